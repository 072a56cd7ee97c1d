"""Charts of a comparison: curves over updates, time and bytes."""

import json
import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from ...measure import Run
from .comparison import (
    Comparison,
    MethodRuns,
    Metric,
    has_measured_time,
    seed_of,
)
from .formatting import format_number


class Charts:
    """Collects charts; each method returns the element that the script fills, or None if there is nothing to draw.

    >>> charts = Charts()
    >>> charts.as_json()
    '{"methods": [], "grids": [], "charts": []}'
    """

    def __init__(self) -> None:
        self._methods: dict[str, int] = {}
        self._grids: dict[str, int] = {}
        self._charts: list[dict[str, Any]] = []

    def curve(self, comparison: Comparison, name: str) -> str | None:
        """A metric over steps, time or bytes, with the spread of the seeds and the moments of the switch."""
        main, label, metric = curve_spec(comparison)
        scale = metric.scale if name == main else 1.0
        lines, ends = [], []
        for method in comparison.methods:
            marks = [mark._asdict() for run in method.runs[:1] for mark in switch_marks(run)]
            for curve in mean_curves(method, name, scale):
                line = {"method": self._method(method.name), "label": curve.label, "y": _short(curve.mean)}
                line["grid"] = self._grid({
                    "step": curve.steps, "time": _short(curve.seconds), "bytes": _short(curve.bytes),
                })  # fmt: skip
                if curve.low != curve.high:
                    line |= {"low": _short(curve.low), "high": _short(curve.high)}
                lines.append(line | {"marks": marks})
                ends.append(f"{method.name} ends at {format_number(curve.mean[-1], 4)}")
        if not lines:
            return None
        shown = label if name == main else name
        said, number = escape(f"{shown}, mean over seeds. {'; '.join(ends)}."), len(self._charts)
        self._charts.append({"label": shown, "lines": lines})
        return (
            f'<div class="chart curve" data-chart="{number}" role="group" aria-label="{said}">'
            f'<p class="soft">{said}</p></div>'
        )

    def as_json(self) -> str:
        """The data of all charts. It contains no `<`, so that it cannot end a script element."""
        methods = []
        for name in self._methods:
            light, dark = method_colour(name)
            methods.append({"name": name, "light": light, "dark": dark, "dash": method_dash(name)})
        grids = [json.loads(grid) for grid in self._grids]
        data = {"methods": methods, "grids": grids, "charts": self._charts}
        return json.dumps(data, allow_nan=False).replace("<", "\\u003c")

    def _method(self, name: str) -> int:
        return self._methods.setdefault(name, len(self._methods))

    def _grid(self, grid: Mapping[str, Sequence[float | None] | None]) -> int:
        """Positions of points, which many curves share."""
        return self._grids.setdefault(json.dumps(grid), len(self._grids))


def _short(values: Sequence[float | None] | None) -> list[float | None] | None:
    """Numbers with five digits, to keep the page small."""
    return None if values is None else [None if x is None else float(f"{x:.5g}") for x in values]


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


def mean_curves(method: MethodRuns, name: str, scale: float = 1.0) -> list[Curve]:
    """A metric of a method: the mean over its finished runs, and a curve of its own for each unfinished one."""
    unfinished = [run for run in method.runs if not run.finished]
    groups = [("", method.finished)]
    groups += [(f"seed {seed_of(run)}, unfinished", [run]) for run in unfinished]
    return [curve for label, runs in groups if (curve := _mean(label, runs, name, scale))]


def _mean(label: str, runs: Sequence[Run], name: str, scale: float) -> Curve | None:
    found = [(run, values) for run in runs if (values := _values(run, name))]
    steps = sorted(set.intersection(*(set(values) for _, values in found))) if found else []
    if not steps:
        return None
    if len(steps) > MAX_POINTS:
        steps = [steps[round(i * (len(steps) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]
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


#: Light and dark mode. The colours of Okabe and Ito, which are safe for colour-blind readers, then further ones.
_PALETTE = (
    ("#0072b2", "#4fa8e0"), ("#c44e00", "#f5813a"), ("#00825e", "#2fc798"), ("#a8437a", "#e08fba"),
    ("#9a6700", "#f0b840"), ("#5b4fc4", "#a79df5"), ("#1d7f8c", "#57c7d4"), ("#a3293d", "#f2828f"),
    ("#5f7a12", "#a9c85a"), ("#7a5236", "#cda283"),
)  # fmt: skip
#: Methods that often stand side by side have different colours.
_FIXED = {
    "dense": ("#3c4046", "#d5d8dc"), "bf16": ("#7b828b", "#9aa1a9"), "pufferfish": _PALETTE[0],
    "powersgd(4)": _PALETTE[1], "pufferfish+powersgd(4)": _PALETTE[2], "narrow": _PALETTE[3], "auto": _PALETTE[4],
    "early-bird(0.5)": _PALETTE[6], "lottery-ticket(5)": _PALETTE[7],
}  # fmt: skip


def method_colour(name: str) -> tuple[str, str]:
    """The colours of a method for light and for dark mode. They depend on the name only; two names may share a colour.

    >>> method_colour("pufferfish")
    ('#0072b2', '#4fa8e0')
    >>> method_colour("my method") == method_colour("my method")
    True
    """
    return _FIXED.get(name) or _PALETTE[zlib.crc32(name.encode()) % len(_PALETTE)]


def method_dash(name: str) -> list[int]:
    """Dashes of a method's line, so that methods of one colour differ; empty for a solid line.

    >>> method_dash("dense")
    []
    """
    dashes: list[list[int]] = [[], [8, 4], [2, 3], [8, 3, 2, 3]]
    return [] if name in _FIXED else dashes[zlib.crc32(name.encode()) // len(_PALETTE) % len(dashes)]
