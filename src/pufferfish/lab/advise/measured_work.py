"""`measured_work`: the work of a step of a `TimedModel`, for the cost model."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ...compression.method import Method
from ...distributed.workers import Workers
from ...layers.names import trainable_parameters
from ...measure import Work
from ...measure.breakdown import trimmed_mean
from ...measure.cost_model import (
    COMPUTE_PARTS,
    measure_compute,
    with_compression,
    with_ddp_messages,
)
from ...measure.options import TrainingOption
from .timed_model import TimedModel

#: Seconds to time steps for, and the least and largest number of steps.
_SECONDS, _MIN_STEPS, _MAX_STEPS = 1.0, 5, 50


def measured_work(model: TimedModel) -> Work:
    """Measure the compute of a step: averaged over the workers, then scaled to the time of the slowest worker."""
    workers = Workers.of_job("advise")
    for _ in range(2):
        (seconds,) = workers.mean([model.compute_seconds()])
    steps = max(_MIN_STEPS, min(_MAX_STEPS, int(_SECONDS / seconds)))
    work = measure_compute(model.model, lambda: model.step(exchange=False), model.optimizer, steps=steps)
    means = workers.mean([getattr(work, name) for name in COMPUTE_PARTS])
    parts: dict[str, Any] = dict(zip(COMPUTE_PARTS, means, strict=True))
    slowest = max(sum(means), _slowest_seconds(model, steps))
    buffer_bytes = sum(x.nbytes for x in model.inner.buffers()) if workers.size > 1 else 0
    curve = tuple((x, y) for x, y in workers.gather(lambda: work.gradient_curve)[0])
    work = replace(work, **parts, buffer_bytes=buffer_bytes, gradient_curve=curve)
    return with_compute_seconds(work, slowest)


def repeated_seconds(model: TimedModel, seconds: float) -> float:
    """Measure the compute of a few more steps of the slowest worker, for about 0.3 s.

    Args:
        seconds: of a step, as measured before; the same on all workers.
    """
    return _slowest_seconds(model, max(2, min(_MAX_STEPS, int(0.3 * _SECONDS / seconds))))


def _slowest_seconds(model: TimedModel, steps: int) -> float:
    own = torch.tensor([model.compute_seconds() for _ in range(steps)], dtype=torch.float64)
    slowest: list[float] = Workers.of_job("advise").max(own).tolist()
    return trimmed_mean(slowest)


def compute_seconds(work: Work) -> float:
    """Seconds of a step without communication."""
    return float(sum(getattr(work, name) for name in COMPUTE_PARTS))


def with_compute_seconds(work: Work, seconds: float) -> Work:
    """`work` with all parts of the compute scaled so that they take `seconds` together."""
    scale = seconds / compute_seconds(work)
    scaled: dict[str, Any] = {name: scale * getattr(work, name) for name in COMPUTE_PARTS}
    return replace(work, **scaled)


def with_messages(work: Work, model: torch.nn.Module, method: Method | None, size: int) -> Work:
    """Return `work` with the messages of plain DDP, or those of a dry run of a compression method.

    Args:
        model: the model without wrappers.
        method: compression method; None: plain DDP.
    """
    parameters = trainable_parameters(model)
    if method is None:
        return with_ddp_messages(work, parameters)
    if dist.is_initialized():
        dist.barrier()
    return slowest_coding(with_compression(work, method, parameters, size))


def slowest_coding(work: Work) -> Work:
    """Return `work` with the encode and decode times of the slowest worker, for which the others wait."""
    fragments = () if work.local is None else work.local.fragments
    own = [(work.encode, work.decode), *((f.encode, f.decode) for f in fragments)]
    slowest = Workers.of_job("advise").max(torch.tensor(own, dtype=torch.float64)).tolist()
    (encode, decode), *coding = slowest
    if work.local is not None:
        each = zip(fragments, coding, strict=True)
        slow = tuple(replace(fragment, encode=e, decode=d) for fragment, (e, d) in each)
        work = replace(work, local=replace(work.local, fragments=slow))
    return replace(work, encode=encode, decode=decode)


def option_of_slowest(option: TrainingOption) -> TrainingOption:
    """`slowest_coding` for the work of an option and of its warm-up."""
    warm_up = option.warm_up and slowest_coding(option.warm_up)
    return replace(option, work=slowest_coding(option.work), warm_up=warm_up)
