"""`pareto_views`: quality over size, bytes and time, for every method, and which methods no other one beats in both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .comparison import DENSE, Comparison
from .formatting import format_bytes, format_number, format_seconds
from .headline import median_cell, score_cell
from .link_times import HOSTS, LINKS, bytes_per_step, run_seconds, step_seconds, workers
from .tables import Cell, Table

_SPEEDS = dict(zip(LINKS, ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s"), strict=True))


@dataclass(frozen=True)
class View:
    """Methods by cost. Lower costs are better.

    Args:
        kind: how costs are shown, "count", "bytes" or "seconds".
        costs: by method; those without quality or cost are left out.
        front: methods that no other method beats in both quality and cost, from the cheapest on.
    """

    title: str
    label: str
    kind: str
    costs: Mapping[str, float]
    front: Sequence[str]


def pareto_views(comparison: Comparison) -> list[View]:
    """Quality over parameters, bytes per step and time: on one device, and on links of three speeds.

    A view needs two methods with a quality and different costs.
    """
    quality = _quality(comparison)
    views = []
    for title, label, kind, costs in _costs(comparison):
        known = {name: cost for name, cost in costs.items() if name in quality and cost}
        if len({*known.values()}) > 1:
            front = pareto_front({name: (cost, quality[name]) for name, cost in known.items()})
            views.append(View(title, label, kind, known, front))
    return views


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the points (cost, quality) for which no other one costs less and is as good, or costs as much and is better.

    >>> pareto_front({"dense": (11.0, 94.0), "small": (3.0, 93.5), "poor": (5.0, 92.0), "twin": (3.0, 93.5)})
    ['small', 'twin', 'dense']
    """

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] <= b[0] and a[1] >= b[1] and a != b

    best = [name for name, point in points.items() if not any(beats(x, point) for x in points.values())]
    return sorted(best, key=lambda name: points[name])


def pareto_table(comparison: Comparison) -> Table | None:
    """The views as a table; None if there are none."""
    views = pareto_views(comparison)
    if not views:
        return None
    shown: dict[str, Callable[[float], str]] = {
        "count": "{:,.0f}".format, "bytes": format_bytes, "seconds": format_seconds
    }  # fmt: skip
    rows = []
    for method in comparison.methods:
        score = score_cell(comparison, method)
        if not any(method.name in view.costs for view in views):
            continue
        row = [Cell(method.name), score]
        for view in views:
            cost = view.costs.get(method.name)
            mark = " *" if method.name in view.front else ""
            row.append(Cell() if cost is None else Cell(shown[view.kind](cost) + mark, cost))
        rows.append(row)
    columns = ["method", comparison.metric.label, *(view.title for view in views)]
    return Table("Quality and cost", columns, rows, pareto_notes(comparison))


def pareto_notes(comparison: Comparison) -> list[str]:
    """How costs are computed."""
    size = workers(comparison)
    lines = ["* on the Pareto front: no other method is at least as good by its mean and costs less."]
    if any(run.workers > 1 for run in comparison.runs):
        lines.append(
            f"Times on a link are predicted by the cost model for {size} workers from the step's computation and the bytes that it "
            "sends; those of the bench's own link may differ from the measured ones. One device: computation only. Updates before the switch take a step of the dense "
            "model with the same exchange; without runs of it there is no training time."
        )
    else:
        lines.append(
            f"Bytes, and times on a link, are predicted by the cost model for {HOSTS} hosts with one such device each, and DDP with "
            "gradients in bf16."
        )
    return lines


def _quality(comparison: Comparison) -> dict[str, float]:
    """Mean score by method, negated where lower is better."""
    sign = 1.0 if comparison.metric.higher else -1.0
    scores = {method.name: score_cell(comparison, method).value for method in comparison.methods}
    return {name: sign * value for name, value in scores.items() if value is not None}


def _costs(comparison: Comparison) -> list[tuple[str, str, str, dict[str, float | None]]]:
    """Title, axis label, kind and costs of each view."""
    methods, size = comparison.methods, workers(comparison)
    several = any(run.workers > 1 for run in comparison.runs)
    parameters = {m.name: median_cell(m.results("parameters"), format_number).value for m in methods}
    sent = {m.name: bytes_per_step(m, size) for m in methods}
    views = [
        ("parameters", "parameters", "count", parameters),
        (
            "bytes per step" if several else f"bytes on {size} hosts",
            f"bytes that each of {size} {'workers' if several else 'hosts'} sends per step",
            "bytes",
            sent,
        ),
    ]
    for link in (None, *LINKS):
        where = "one device" if link is None else _SPEEDS[link]
        steps = {m.name: step_seconds(m, size, link) for m in methods}
        runs = {m.name: run_seconds(m, steps) for m in methods if steps[m.name]}
        whole = runs.get(DENSE) is not None or (bool(runs) and None not in runs.values())
        costs: dict[str, float | None] = dict(runs) if whole else steps
        what = "training time" if whole else "step time"
        views.append((f"{what}, {where}", f"{what} on {where}", "seconds", costs))
    return views
