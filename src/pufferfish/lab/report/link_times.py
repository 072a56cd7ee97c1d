"""`step_seconds`, `run_seconds`: times of a method on a link of another speed, by the cost model."""

import statistics
from collections.abc import Mapping

from ...measure import CostModel, Link, Work
from ...measure.breakdown import PARTS
from ...measure.link import WIRE_FACTOR
from ...measure.step_messages import ddp_bucket_bytes
from ..network.link_shape import LATENCY, LinkShape
from .comparison import DENSE, Comparison, MethodRuns
from .tables import step_parts

#: Hosts for which runs of a single worker are predicted.
HOSTS = 4
LINKS = ("100mbit", "1gbit", "10gbit")
#: Of a step without an exchange, the part that can hide it. The backward pass has twice the arithmetic of the forward pass.
_BACKWARD = 2 / 3
BF16_BYTES = 2


def workers(comparison: Comparison) -> int:
    """Workers for which times are predicted: those of the runs, or `HOSTS` for runs of a single worker."""
    size = max((run.workers for run in comparison.runs), default=1)
    return size if size > 1 else HOSTS


def trained_parameters(method: MethodRuns) -> float | None:
    """Parameters whose gradients are sent. A model that becomes dense again is low-rank most of the time."""
    return _median(method, "low_rank_parameters") or _median(method, "parameters")


def bytes_per_step(method: MethodRuns, size: int) -> float | None:
    """Bytes that each of `size` workers sends in a step; for runs of a single worker, DDP's with gradients in bf16."""
    if any(run.workers > 1 for run in method.runs):
        return _median(method, "bytes_a_step")
    parameters = trained_parameters(method)
    return None if parameters is None else WIRE_FACTOR["all_reduce"](size) * BF16_BYTES * parameters


def step_seconds(method: MethodRuns, size: int, link: str | None) -> float | None:
    """Seconds of a step on a link; for `link=None`, without the exchange. None if the runs do not say it."""
    compute, parameters = _compute_seconds(method), trained_parameters(method)
    if compute is None or link is None:
        return compute
    if all(run.workers == 1 for run in method.runs):
        return None if parameters is None else predicted_step(compute, parameters, link, size)
    sent = _median(method, "bytes_a_step")
    if sent is None:
        return None
    # Local steps wait for the whole exchange unless it is applied later; gradients are sent during the backward pass.
    waits = bool(_median(method, "bytes_a_round")) and (_median(method, "exchange_updates") or 1) <= 1
    return _predict(compute, sent / WIRE_FACTOR["all_reduce"](size), link, size, overlaps=not waits)


def run_seconds(method: MethodRuns, steps: Mapping[str, float | None]) -> float | None:
    """Seconds of all updates of a run. Those outside of its low-rank phase take a step of the dense model, with its exchange.

    Args:
        steps: seconds of a step by method.

    Returns:
        None if the runs do not say it, or if there are no runs of the dense model with that exchange and optimizer.
    """
    step, dense, totals = steps.get(method.name), steps.get(_warm_up_name(method, steps)), []
    for run in method.finished:
        updates = run.results.get("updates")
        if step is None or updates is None or run.results.get("trainings"):
            return None
        before = run.results.get("updates_before_change", 0)
        if "low_rank_updates" in run.results:
            before = updates - run.results["low_rank_updates"]
        if before and dense is None:
            return None
        totals.append(before * (dense or 0.0) + (updates - before) * step)
    return statistics.median(totals) if totals else None


def _warm_up_name(method: MethodRuns, names: Mapping[str, object]) -> str:
    """The method with the dense model, and the exchange and optimizer of `method`: those are the same before the switch.

    Names are MODEL+EXCHANGE@OPTIMIZER (FOLDER), see `bench_method` and `compare_runs`. A single worker exchanges nothing.
    """
    name, bracket, folder = method.name.partition(" (")
    _, at, optimizer = name.rpartition("@")
    exchange = name.partition("+")[2] if any(run.workers > 1 for run in method.runs) else ""
    dense = exchange or (f"{DENSE}@{optimizer}" if at else DENSE)
    beside = dense + bracket + folder
    return beside if beside in names else dense


def predicted_step(seconds: float, parameters: float, link: str, size: int = HOSTS) -> float:
    """Seconds of a step of DDP with gradients in bf16.

    Args:
        seconds: of the step on one device, without an exchange.

    >>> round(predicted_step(0.05, 25e6, "1gbit"), 2), round(predicted_step(0.05, 25e6, "100gbit"), 2)
    (0.65, 0.05)
    """
    return _predict(seconds, BF16_BYTES * parameters, link, size, overlaps=True)


def _predict(seconds: float, nbytes: float, link: str, size: int, overlaps: bool) -> float:
    """Seconds of a step with ring all-reduces of `nbytes` bytes in total."""
    count = max(round(nbytes / 2**20), 1)  # DDP's buckets are filled tensor by tensor
    buckets = ddp_bucket_bytes([round(nbytes / count)] * count)
    shape = LinkShape.parse(link)
    latency = 1e-3 * shape.delay_ms + LATENCY
    costs = CostModel(link=Link.nominal(bandwidth=1e6 * shape.mbit, latency=latency, size=size))
    messages = tuple(("all_reduce", nbytes) for nbytes in buckets if nbytes)
    backward = _BACKWARD * seconds
    work = Work(forward=seconds - backward, backward=backward, messages=messages, overlaps=overlaps)
    return costs.predict(work).step


def _compute_seconds(method: MethodRuns) -> float | None:
    """Seconds of a step without its exchange, measured or predicted."""
    if all(run.workers == 1 for run in method.runs):
        return _median(method, "seconds_a_step")
    if parts := step_parts(method):
        return sum(parts.get(name, 0.0) for name in PARTS if name != "exchange")
    for values in (method.results, method.predictions):
        step, share = values("seconds_a_step"), values("utilisation")
        if step and share:
            return statistics.median(step.values()) * statistics.median(share.values())
    return None


def _median(method: MethodRuns, key: str) -> float | None:
    values = method.results(key).values()
    return statistics.median(values) if values else None
