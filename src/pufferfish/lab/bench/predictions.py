"""What the cost model says a step of each method takes, before the rounds that it is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...measure import CostModel, Work, probe
from ...measure.breakdown import PARTS
from ...measure.remedies import message_bytes
from ..advise.contender import Contender
from ..advise.measured_work import computing, sending
from ..network import Shape
from ..rivals import SAM


def predictions(
    contenders: Mapping[str, Contender], elsewhere: Shape | None = None
) -> dict[str, dict[str, float]]:
    """Seconds of every method's step and its parts, by method. Call it on all ranks, when all is warm.

    Each method's computing is timed without exchange, its compression runs dry, and the link is probed. Nothing is
    fitted to steps with an exchange.

    Args:
        elsewhere: another link than this one, to predict for.
    """
    works = {name: _work(contender) for name, contender in contenders.items()}
    first = next(iter(contenders.values()))
    link = probe(device=first.device, largest=message_bytes(first.bare))
    if elsewhere is not None:
        link = link.at(bandwidth=1e6 * elsewhere.mbit, latency=1e-3 * elsewhere.delay_ms)
    costs = CostModel(link=link)
    found = {}
    for name, work in works.items():
        said = costs.predict(work)
        found[name] = {"seconds": said.step} | {part: getattr(said, part) for part in (*PARTS, "hidden")}
    return found


def _work(contender: Contender) -> Work:
    """What a step computes and sends; where nothing compresses, by the buckets that DDP has made."""
    work = computing(contender)
    if isinstance(contender.optimizer, SAM):  # the first of its two passes is not followed by an exchange
        work = replace(work, forward=work.forward + work.backward / 2, backward=work.backward / 2)
    work = sending(work, contender.bare, contender.chosen.compress, contender.size)
    if contender.hook is not None:
        return work
    sizes = tuple(contender.buckets())
    return replace(work, messages=tuple(("all_reduce", n) for n in sizes), handed=sizes)
