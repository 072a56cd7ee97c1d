"""The figures of a page: each says in its description what can be seen in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...measure.breakdown import PARTS
from .curves import Point, charted, mean_curve
from .groups import Comparison
from .numbers import nbytes, seconds, significant
from .svg import COLOURS, Scale, around, axes, cut, drawing, element, mark, path, spread, text
from .tables import BAND, group_parts

WIDTH = 480.0


@dataclass(frozen=True)
class Line:
    """One method's mean over seeds, and from the lowest to the highest seed."""

    name: str
    index: int
    points: Sequence[Point]


def curves(comparison: Comparison, over: str) -> str | None:
    """The validation measure, or else the loss, over "seconds" or "bytes", a line for each method."""
    name, axis, measure = charted(comparison)
    found = [mean_curve(group, name, over, measure.scale) for group in comparison.groups]
    if not any(found):
        return None
    unit, size = _time_unit(max(p[0] for points in found for p in points)) if over == "seconds" else ("", 1.0)
    lines = [
        Line(group.name, i, [(x / size, mean, low, high) for x, mean, low, high in points])
        for i, (group, points) in enumerate(zip(comparison.groups, found, strict=True))
        if points
    ]
    label = f"training time, {unit}" if over == "seconds" else "bytes sent by each worker"
    ends = "; ".join(f"{line.name} ends at {line.points[-1][1]:.{measure.places}f}" for line in lines)
    return _line_chart(
        f"{measure.name} over {'time' if over == 'seconds' else 'bytes'}",
        f"Mean over seeds of {name}. {ends}.",
        lines, (label, axis), significant if over == "seconds" else nbytes, log=over == "bytes",
    )  # fmt: skip


def bars(comparison: Comparison) -> str | None:
    """A step of each method, stacked by what the time went to; plain where nobody knows."""
    rows = []
    for group in comparison.groups:
        parts, whole = group_parts(group), list(group.results("seconds_a_step").values())
        if parts or whole:
            rows.append((group.name, parts or {"": sum(whole) / len(whole)}))
    if not rows:
        return None
    sums = [sum(v for k, v in parts.items() if k != "hidden") for _, parts in rows]
    scale = Scale(0, max(sums) or 1.0, 0, WIDTH - 1)
    height, drawn = 46.0, []
    for n, ((name, parts), total) in enumerate(zip(rows, sums, strict=True)):
        top = n * height
        drawn.append(element("text", text(name), class_="label", x=0, y=top + 14))
        note = seconds(total) + ("" if set(parts) & set(PARTS) else ", not broken down")
        drawn.append(element("text", text(note), class_="label", x=WIDTH, y=top + 14, text_anchor="end"))
        drawn.append(_bar(parts, scale, top + 20))
    said = "; ".join(f"{name} {seconds(total)}" for (name, _), total in zip(rows, sums, strict=True))
    return drawing("Where a step's time goes", f"Stacked bars: {said}.", WIDTH, height * len(rows), *drawn)


def scatter(comparison: Comparison) -> str | None:
    """Predicted over measured seconds a step, with the band in which a prediction counts as right."""
    points = []
    for i, group in enumerate(comparison.groups):
        said, got = group.predictions("seconds_a_step"), group.results("seconds_a_step")
        points += [
            (i, group.name, got[s], said[s]) for s in sorted(said.keys() & got.keys()) if got[s] > 0 < said[s]
        ]
    if not points:
        return None
    low, high = around([v for point in points for v in point[2:]], log=True, room=0.12)
    right = WIDTH - _label_width([name for _, name, _, _ in points])
    x, y = Scale(low, high, 58, right, log=True), Scale(low, high, 300, 28, log=True)
    edges = [(x(low), y(low * (1 - BAND))), (x(high), y(high * (1 - BAND)))]
    edges += [(x(high), y(high * (1 + BAND))), (x(low), y(low * (1 + BAND)))]
    inside = element("path", class_="band", d=path(edges) + "z")
    inside += element("path", class_="ideal", d=path([(x(low), y(low)), (x(high), y(high))]))
    drawn = [axes(x, y, ("measured, a step", "predicted, a step"), (seconds, seconds))]
    drawn.append(cut(x.start, y.end, x.end - x.start, y.start - y.end, inside))
    for i, name, measured, predicted in points:
        label = f"{name}: predicted {seconds(predicted)}, measured {seconds(measured)}"
        drawn.append(mark(i, x(measured), y(predicted), label))
    last = {i: (name, x(got), y(said)) for i, name, got, said in points}
    drawn.append(_labels([(i, *where) for i, where in last.items()], right + 10, y))
    within = sum(abs(said / got - 1) <= BAND for _, _, got, said in points)
    described = f"{within} of {len(points)} runs within {BAND:.0%} of the measured time."
    return drawing("Predicted against measured time of a step", described, WIDTH, 340, *drawn)


def part_swatch(name: str) -> str:
    shape = element("rect", width=16, height=16, class_=f"part {name}")
    return element("svg", shape, viewBox="0 0 16 16", aria_hidden="true", class_="swatch")


def _line_chart(
    title: str,
    described: str,
    lines: Sequence[Line],
    labels: tuple[str, str],
    show_x: Callable[[float], str],
    log: bool,
) -> str:
    right = WIDTH - _label_width([line.name for line in lines])
    xs = [p[0] for line in lines for p in line.points]
    low, high = (min(xs) / 1.1, max(xs)) if log else (0.0, max(xs))
    x = Scale(low, high if high > low else low + 1, 48, right, log)
    late = [v for line in lines for p in line.points[len(line.points) // 2 :] for v in p[1:]]
    y = Scale(*around(late), 300, 28)
    inside, marks = [], []
    for line in lines:
        colour = f"c{line.index % COLOURS}"
        means = [(x(a), y(b)) for a, b, _, _ in line.points]
        edge = [(x(p[0]), y(p[3])) for p in line.points] + [(x(p[0]), y(p[2])) for p in reversed(line.points)]
        inside.append(element("path", class_=f"spread {colour}", d=path(edge) + "z"))
        dashed = "" if line.index < COLOURS else " dashed"
        inside.append(
            element("path", element("title", text(line.name)), class_=f"line {colour}{dashed}", d=path(means))
        )
        shown = means[:: max(1, math.ceil(len(means) / 6))]
        marks += [
            mark(line.index, *p) for p in dict.fromkeys([*shown, means[-1]]) if y.end <= p[1] <= y.start
        ]
    drawn = [axes(x, y, labels, (show_x, lambda v: f"{v:g}"))]
    drawn.append(cut(x.start, y.end, x.end - x.start, y.start - y.end, *inside))
    ends = [(line.index, line.name, x(line.points[-1][0]), y(line.points[-1][1])) for line in lines]
    return drawing(title, described, WIDTH, 340, *drawn, *marks, _labels(ends, right + 10, y))


def _bar(parts: Mapping[str, float], scale: Scale, top: float) -> str:
    """Parts one after the other; what hid behind backward as a strip below it, for it took no time of its own."""
    at, drawn = 0.0, []
    for name in (*PARTS, ""):
        value = parts.get(name, 0.0)
        if value <= 0:
            continue
        x, width = scale(at), scale(value)
        label = element("title", text(f"{name or 'step'}: {seconds(value)}"))
        drawn.append(element("rect", label, class_=f"part {name}", x=x, y=top, width=width, height=18.0))
        if width > 6.2 * len(name) + 6:
            drawn.append(
                element(
                    "text",
                    text(name),
                    class_=f"inside {name}",
                    x=x + width / 2,
                    y=top + 13,
                    text_anchor="middle",
                )
            )
        at += value
        if name == "backward" and parts.get("hidden"):
            hidden = min(scale(parts["hidden"]), scale(at))
            label = element("title", text(f"exchange hidden behind backward: {seconds(parts['hidden'])}"))
            drawn.append(
                element(
                    "rect",
                    label,
                    class_="part hidden",
                    x=scale(at) - hidden,
                    y=top + 19,
                    width=hidden,
                    height=5.0,
                )
            )
    return "".join(drawn)


def _labels(ends: Sequence[tuple[int, str, float, float]], x: float, y: Scale) -> str:
    """Names beside the plot, moved apart, each with a thin line to its point."""
    drawn = []
    places = spread([end[3] for end in ends], 15, y.end, y.start)
    for (index, name, at_x, at_y), place in zip(ends, places, strict=True):
        colour = f"c{index % COLOURS}"
        drawn.append(element("path", class_=f"leader {colour}", d=path([(at_x + 5, at_y), (x - 3, place)])))
        drawn.append(element("text", text(_cut(name)), class_=f"label {colour}", x=x, y=place + 4))
    return "".join(drawn)


def _label_width(names: Sequence[str]) -> float:
    return 6.9 * max(len(_cut(name)) for name in names) + 14


def _cut(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}…"


def _time_unit(most: float) -> tuple[str, float]:
    return ("s", 1.0) if most < 180 else ("min", 60.0) if most < 7200 else ("h", 3600.0)
