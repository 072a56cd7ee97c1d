"""`network_table`: the runs of a bench on one device, as they would be on several hosts, by the cost model."""

import statistics
from collections.abc import Sequence

from ...measure import CostModel, Link, Work
from ...measure.step_messages import ddp_bucket_bytes
from ..network import LinkShape
from ..report.comparison import DENSE, Comparison, MethodRuns
from ..report.formatting import format_bytes, format_seconds
from ..report.tables import Cell, Table
from ..train.predict_step import LATENCY

HOSTS = 4
LINKS = ("100mbit", "1gbit", "10gbit")
#: Of a step without an exchange, the part that can hide it. The backward pass has twice the arithmetic of the forward pass.
_BACKWARD = 2 / 3
_BF16_BYTES = 2


def network_table(comparison: Comparison, links: Sequence[str] = LINKS) -> Table | None:
    """Gradient bytes, and the predicted times of a step and of a run on hosts that each compute what the device did.

    None for runs of several workers, and without a dense run, whose updates low-rank runs begin with.
    """
    measured = {method.name: _median(method, "seconds_a_step") for method in comparison.methods}
    sizes = {  # a model that becomes dense again is low-rank most of the time
        method.name: _median(method, "low_rank_parameters") or _median(method, "parameters")
        for method in comparison.methods
    }
    if any(run.workers > 1 for run in comparison.runs) or not (measured.get(DENSE) and sizes.get(DENSE)):
        return None
    rows = []
    for method in comparison.methods:
        row = [Cell(method.name)]
        seconds, size = measured[method.name], sizes[method.name]
        if not seconds or not size:
            rows.append(row + [Cell()] * (1 + 2 * len(links)))
            continue
        row.append(Cell(format_bytes(_BF16_BYTES * size), _BF16_BYTES * size))
        for link in links:
            step = predicted_step(seconds, size, link)
            dense = predicted_step(measured[DENSE], sizes[DENSE], link)  # type: ignore[arg-type]
            total = _run_seconds(method, dense, step)
            row += [
                Cell(format_seconds(step), step),
                Cell() if total is None else Cell(format_seconds(total), total),
            ]
        rows.append(row)
    heads = [f"{what}, {link}" for link in links for what in ("step", "run")]
    notes = [
        f"Predicted for {HOSTS} hosts with such a link each and one device each, which computes what it computed here. DDP sends "
        "gradients in bf16 by a ring all-reduce, during the backward pass, which is taken to be two thirds of the step. A run has "
        "dense updates before its switch."
    ]
    return Table(f"{HOSTS} hosts, by the cost model", ["method", "gradients, bf16", *heads], rows, notes)


def predicted_step(seconds: float, parameters: float, link: str) -> float:
    """Seconds of a step on `HOSTS` hosts.

    Args:
        seconds: of the step on one device, without an exchange.

    >>> round(predicted_step(0.05, 25e6, "1gbit"), 2), round(predicted_step(0.05, 25e6, "100gbit"), 2)
    (0.65, 0.05)
    """
    shape = LinkShape.parse(link)
    latency = 1e-3 * shape.delay_ms + LATENCY
    costs = CostModel(link=Link.nominal(bandwidth=1e6 * shape.mbit, latency=latency, size=HOSTS))
    piece = 2**20  # of the gradients; DDP's buckets are filled tensor by tensor
    count = max(round(_BF16_BYTES * parameters / piece), 1)
    buckets = ddp_bucket_bytes([round(_BF16_BYTES * parameters / count)] * count)
    messages = tuple(("all_reduce", nbytes) for nbytes in buckets)
    backward = _BACKWARD * seconds
    return costs.predict(
        Work(forward=seconds - backward, backward=backward, messages=messages, overlaps=True)
    ).step


def _run_seconds(method: MethodRuns, dense: float, step: float) -> float | None:
    """Seconds of all updates of a run; those outside of its low-rank phase are dense."""
    totals = []
    for run in method.finished:
        updates = run.results.get("updates")
        if updates is None or run.results.get("trainings"):
            return None
        before = run.results.get("updates_before_change", 0)
        if "low_rank_updates" in run.results:
            before = updates - run.results["low_rank_updates"]
        totals.append(before * dense + (updates - before) * step)
    return statistics.median(totals) if totals else None


def _median(method: MethodRuns, key: str) -> float | None:
    values = method.results(key).values()
    return statistics.median(values) if values else None
