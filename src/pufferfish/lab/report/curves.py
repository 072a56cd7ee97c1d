"""Metrics of runs over time, over bytes and over seeds."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from ...measure import Run
from .groups import Comparison, Group, Measure, clocked

#: Where on the axis, the mean over seeds, the lowest and the highest seed.
Point = tuple[float, float, float, float]
MOST_POINTS = 160  # of a line; more than a screen shows


class Charted(NamedTuple):
    """What the curves are of: the rows' name, what the axis says, and the measure."""

    rows: str
    label: str
    measure: Measure


def charted(comparison: Comparison) -> Charted:
    """The validation measure; where nobody validated, the loss that a loop logs."""
    measure = comparison.measure
    validated = Charted(f"valid/{measure.name}", f"validation {measure.label}", measure)
    for found in (validated, Charted("loss", "loss", Measure("loss", higher=False))):
        if any(curve(run, found.rows, "seconds") for run in comparison.runs):
            return found
    return validated


def mean_curve(group: Group, name: str, over: str, scale: float = 1.0) -> list[Point]:
    """A metric over "seconds" or "bytes", at the steps that all of a method's runs have."""
    shown = [run for run in group.runs if over != "seconds" or clocked(run)]
    found = [points for run in shown if (points := curve(run, name, over))]
    steps = sorted(set.intersection(*(set(points) for points in found))) if found else []
    if len(steps) > MOST_POINTS:
        steps = [steps[round(i * (len(steps) - 1) / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]
    line = []
    for step in steps:
        values = [points[step][1] * scale for points in found]
        x = statistics.fmean(points[step][0] for points in found)
        if x > 0 or over == "seconds":  # bytes go on a logarithmic scale
            line.append((x, statistics.fmean(values), min(values), max(values)))
    return line


def curve(run: Run, name: str, over: str) -> dict[int, tuple[float, float]]:
    """A metric by step, each with where that was on the other axis."""
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


def typical(run: Run, name: str) -> float | None:
    """A metric's median over the second half of a run, when the start and the switch are over."""
    values = [value for _, _, value in run.metrics.get(name, []) if math.isfinite(value)]
    return statistics.median(values[len(values) // 2 :]) if values else None


def first_to(run: Run, measure: Measure, target: float) -> float | None:
    """Seconds until the validation measure was as good as `target`, in the units it is shown in."""
    for seconds, _, value in run.metrics.get(f"valid/{measure.name}", []):
        shown = value * measure.scale
        if shown >= target if measure.higher else shown <= target:
            return seconds
    return None
