"""`predictions`: step times by the cost model, to be compared with the timed rounds."""

from collections.abc import Mapping
from dataclasses import replace

from ...layers.names import trainable_parameters
from ...measure import CostModel, Work, probe
from ...measure.breakdown import PARTS
from ...measure.cost_model import (
    built_buckets,
    probe_bytes,
    with_buckets,
    with_local_exchange,
)
from ..advise.measured_work import measured_work, with_messages
from ..advise.timed_model import TimedModel
from ..network import LinkShape
from ..rivals import SAM


def predictions(
    models: Mapping[str, TimedModel], target_link: LinkShape | None = None
) -> dict[str, dict[str, float]]:
    """Predict the seconds of a step and of its parts, by method. Call it on all workers, after a warm-up.

    The compute of each model is timed without the exchange, its compression is timed in a dry run, and the link is
    probed, or `target_link` is used. Nothing is fitted to steps with an exchange.
    """
    works = {name: _work(model) for name, model in models.items()}
    first = next(iter(models.values()))
    link = probe(device=first.device, largest=probe_bytes(first.inner))
    if target_link is not None:
        link = link.limited_to(bandwidth=1e6 * target_link.mbit, latency=1e-3 * target_link.delay_ms)
    costs = CostModel(link=link)
    predicted = {name: costs.predict(work) for name, work in works.items()}
    return {
        name: {"seconds": p.step} | {part: getattr(p, part) for part in (*PARTS, "hidden")}
        for name, p in predicted.items()
    }


def _work(model: TimedModel) -> Work:
    """Compute and messages of a step; without compression, the messages are the buckets that DDP has built."""
    work = measured_work(model)
    if isinstance(model.optimizer, SAM):  # only the second of its two passes overlaps with the exchange
        work = replace(work, forward=work.forward + work.backward / 2, backward=work.backward / 2)
    if (local := model.method.local) is not None:
        parameters = trainable_parameters(model.inner)
        return with_local_exchange(work, local.schedule, local.settings, parameters, model.size)
    work = with_messages(work, model.inner, model.method.compress, model.size)
    if model.hook is not None:
        return work
    assert model.ddp is not None
    return with_buckets(work, built_buckets(model.ddp))
