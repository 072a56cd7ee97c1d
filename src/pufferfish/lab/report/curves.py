"""Training curves: metrics by step, with times and bytes, averaged over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...measure import Run
from .comparison import Comparison, MethodRuns, Metric, has_measured_time, seed_of

MAX_POINTS = 160  # per curve; more than a screen shows


class CurveSpec(NamedTuple):
    """The metric that the curves show: its name in metrics.csv, its axis label, and how it is shown."""

    name: str
    label: str
    metric: Metric


@dataclass(frozen=True)
class Curve:
    """A metric at the steps that all runs of a curve have: mean, lowest and highest seed, by step.

    Args:
        label: "" for the finished runs of a method; says which run it is for an unfinished one.
        seconds: training time; None if it was not measured.
        bytes: sent by each worker; None if none were recorded.
    """

    label: str
    steps: list[int]
    seconds: list[float] | None
    bytes: list[float] | None
    mean: list[float]
    low: list[float]
    high: list[float]


def curve_spec(comparison: Comparison) -> CurveSpec:
    """The validation metric, or the training loss where no run recorded a validation metric."""
    metric = comparison.metric
    validation = CurveSpec(f"valid/{metric.name}", f"validation {metric.label}", metric)
    for spec in (validation, CurveSpec("loss", "loss", Metric("loss", higher=False))):
        if any(_values(run, spec.name) for run in comparison.runs):
            return spec
    return validation


def mean_curves(method: MethodRuns, name: str, scale: float = 1.0, most: int = MAX_POINTS) -> list[Curve]:
    """A metric of a method: the mean over its finished runs, and a curve of its own for each unfinished one."""
    unfinished = [run for run in method.runs if not run.finished]
    groups = [("", method.finished)]
    groups += [(f"seed {seed_of(run)}, unfinished", [run]) for run in unfinished]
    return [curve for label, runs in groups if (curve := _mean(label, runs, name, scale, most))]


def _mean(label: str, runs: Sequence[Run], name: str, scale: float, most: int) -> Curve | None:
    found = [(run, values) for run in runs if (values := _values(run, name))]
    steps = sorted(set.intersection(*(set(values) for _, values in found))) if found else []
    if not steps:
        return None
    if len(steps) > most:
        steps = [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]
    seeds = [[scale * values[step][1] for _, values in found] for step in steps]
    timed = all(has_measured_time(run) for run, _ in found)
    seconds = [statistics.fmean(values[step][0] for _, values in found) for step in steps]
    sent = [_bytes_at(run, steps) for run, _ in found if run.metrics.get("bytes")]
    nbytes = [statistics.fmean(each) for each in zip(*sent, strict=True)] if len(sent) == len(found) else []
    return Curve(
        label, steps, seconds if timed else None, nbytes if any(nbytes) else None,
        [statistics.fmean(each) for each in seeds], [min(each) for each in seeds], [max(each) for each in seeds],
    )  # fmt: skip


def _values(run: Run, name: str) -> dict[int, tuple[float, float]]:
    """The finite values of a metric by step, with their times."""
    rows = run.metrics.get(name, [])
    return {step: (seconds, value) for seconds, step, value in rows if math.isfinite(value)}


def _bytes_at(run: Run, steps: Sequence[int]) -> list[float]:
    """Bytes sent until each of these steps."""
    rows, at, total = run.metrics.get("bytes", []), 0, 0.0
    sent = []
    for step in steps:
        while at < len(rows) and rows[at][1] <= step:
            total = rows[at][2]
            at += 1
        sent.append(total)
    return sent


class Mark(NamedTuple):
    """A moment at which the model changed."""

    label: str
    step: int
    seconds: float | None
    bytes: float | None


def switch_marks(run: Run) -> list[Mark]:
    """Where the model became low-rank, and dense again: from the rows of `switch.report.metrics`, or from the results."""
    before, after = (run.metrics.get(f"pufferfish/parameters_{x}", []) for x in ("before", "after"))
    sizes = {step: value for _, step, value in before}
    names = {step: "switch" if value < sizes.get(step, math.inf) else "full rank" for _, step, value in after}
    changed = run.results.get("updates_before_change")
    if not names and isinstance(changed, int) and changed > 0:
        names = {changed: "switch" if run.layers else "change"}
    rows = sorted({(step, seconds) for rows in run.metrics.values() for seconds, step, _ in rows})
    marks = []
    for step, name in sorted(names.items()):
        seconds = next((seconds for at, seconds in reversed(rows) if at <= step), 0.0)
        sent = _bytes_at(run, [step])[0] if run.metrics.get("bytes") else None
        marks.append(Mark(name, step, seconds if has_measured_time(run) else None, sent))
    return marks


def late_median(run: Run, name: str) -> float | None:
    """Median of a metric over the second half of a run, after the start and the switch."""
    values = [value for _, _, value in run.metrics.get(name, []) if math.isfinite(value)]
    return statistics.median(values[len(values) // 2 :]) if values else None
