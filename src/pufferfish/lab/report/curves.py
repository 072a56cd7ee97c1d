"""Training curves: metrics over time or bytes, averaged over seeds."""

import math
import statistics
from typing import NamedTuple

from ...measure import Run
from .comparison import Comparison, MethodRuns, Metric, has_measured_time

#: Position on the x axis, mean over seeds, lowest and highest seed.
Point = tuple[float, float, float, float]
MAX_POINTS = 160  # per curve; more than a screen shows


class CurveSpec(NamedTuple):
    """The metric that the curves show: its name in metrics.csv, its axis label, and how it is shown."""

    name: str
    label: str
    metric: Metric


def curve_spec(comparison: Comparison) -> CurveSpec:
    """The validation metric, or the training loss where no run recorded a validation metric."""
    metric = comparison.metric
    validation = CurveSpec(f"valid/{metric.name}", f"validation {metric.label}", metric)
    for spec in (validation, CurveSpec("loss", "loss", Metric("loss", higher=False))):
        if any(run_curve(run, spec.name, "seconds") for run in comparison.runs):
            return spec
    return validation


def mean_curve(method: MethodRuns, name: str, over: str, scale: float = 1.0) -> list[Point]:
    """A metric over "seconds" or "bytes", at the steps that all runs of a method have."""
    runs = [run for run in method.runs if over != "seconds" or has_measured_time(run)]
    curves = [curve for run in runs if (curve := run_curve(run, name, over))]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    if len(steps) > MAX_POINTS:
        steps = [steps[round(i * (len(steps) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]
    points = []
    for step in steps:
        values = [curve[step][1] * scale for curve in curves]
        x = statistics.fmean(curve[step][0] for curve in curves)
        if x > 0 or over == "seconds":  # bytes are drawn on a logarithmic scale
            points.append((x, statistics.fmean(values), min(values), max(values)))
    return points


def run_curve(run: Run, name: str, over: str) -> dict[int, tuple[float, float]]:
    """A metric by step, as pairs of the position on the x axis ("seconds" or "bytes") and the value."""
    sent = run.metrics.get("bytes", [])
    points: dict[int, tuple[float, float]] = {}
    at, total = 0, 0.0
    for seconds, step, value in run.metrics.get(name, []):
        while at < len(sent) and sent[at][1] <= step:
            total = sent[at][2]
            at += 1
        if math.isfinite(value):
            points[step] = (seconds if over == "seconds" else total, value)
    return points if over == "seconds" or sent else {}


def late_median(run: Run, name: str) -> float | None:
    """Median of a metric over the second half of a run, after the start and the switch."""
    values = [value for _, _, value in run.metrics.get(name, []) if math.isfinite(value)]
    return statistics.median(values[len(values) // 2 :]) if values else None


def seconds_to_target(run: Run, metric: Metric, target: float) -> float | None:
    """Seconds until the validation metric reached `target`, given in the units in which it is shown."""
    for seconds, _, value in run.metrics.get(f"valid/{metric.name}", []):
        shown = value * metric.scale
        if shown >= target if metric.higher else shown <= target:
            return seconds
    return None
