"""The figures of the page. Each has a description for screen readers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...measure.breakdown import PARTS
from .comparison import Comparison
from .curves import Point, curve_spec, mean_curve
from .formatting import format_bytes, format_number, format_seconds
from .svg import (
    COLOURS,
    Scale,
    axes,
    clipped,
    drawing,
    element,
    label,
    mark,
    padded_range,
    path,
    separate,
    text,
)
from .tables import BAND, step_parts

WIDTH = 480.0


@dataclass(frozen=True)
class Curve:
    """The training curve of one method, with the range of its seeds."""

    name: str
    index: int
    points: Sequence[Point]


def curves(comparison: Comparison, over: str) -> str | None:
    """The validation metric, or else the loss, over "seconds" or "bytes", with a curve for each method."""
    name, axis, metric = curve_spec(comparison)
    means = [mean_curve(method, name, over, metric.scale) for method in comparison.methods]
    if not any(means):
        return None
    last = max(p[0] for points in means for p in points)
    unit, size = ("s", 1.0) if last < 180 else ("min", 60.0) if last < 7200 else ("h", 3600.0)
    size = size if over == "seconds" else 1.0
    lines = [
        Curve(method.name, i, [(x / size, mean, low, high) for x, mean, low, high in points])
        for i, (method, points) in enumerate(zip(comparison.methods, means, strict=True))
        if points
    ]
    label = f"training time, {unit}" if over == "seconds" else "bytes sent by each worker"
    ends = "; ".join(f"{line.name} ends at {line.points[-1][1]:.{metric.places}f}" for line in lines)
    return _line_chart(
        f"{metric.words} over {'time' if over == 'seconds' else 'bytes'}",
        f"Mean of {name} over seeds. {ends}.",
        lines, (label, axis), format_number if over == "seconds" else format_bytes, log=over == "bytes",
    )  # fmt: skip


def bars(comparison: Comparison) -> str | None:
    """The step time of each method, stacked by its parts where they are known."""
    rows = []
    for method in comparison.methods:
        parts, whole = step_parts(method), list(method.results("seconds_a_step").values())
        if parts or whole:
            rows.append((method.name, parts or {"": sum(whole) / len(whole)}))
    if not rows:
        return None
    sums = [sum(v for k, v in parts.items() if k != "hidden") for _, parts in rows]
    scale = Scale(0, max(sums) or 1.0, 0, WIDTH - 1)
    height, drawn = 46.0, []
    for n, ((name, parts), total) in enumerate(zip(rows, sums, strict=True)):
        top = n * height
        drawn.append(label(name, "label", 0, top + 14))
        note = format_seconds(total) + ("" if set(parts) & set(PARTS) else " (parts unknown)")
        drawn.append(label(note, "label", WIDTH, top + 14, "end"))
        drawn.append(_bar(parts, scale, top + 20))
    totals = (f"{name} {format_seconds(total)}" for (name, _), total in zip(rows, sums, strict=True))
    described = f"Stacked bars: {'; '.join(totals)}."
    return drawing("Breakdown of the step time", described, WIDTH, height * len(rows), *drawn)


def scatter(comparison: Comparison) -> str | None:
    """Predicted over measured step times, with the band in which a prediction counts as right."""
    points = []
    for i, method in enumerate(comparison.methods):
        predicted, measured = (f("seconds_a_step") for f in (method.predictions, method.results))
        seeds = [s for s in sorted(predicted.keys() & measured.keys()) if measured[s] > 0 < predicted[s]]
        points += [(i, method.name, measured[s], predicted[s]) for s in seeds]
    if not points:
        return None
    low, high = padded_range([v for point in points for v in point[2:]], log=True, room=0.12)
    right = WIDTH - _label_width([name for _, name, _, _ in points])
    x, y = Scale(low, high, 58, right, log=True), Scale(low, high, 300, 28, log=True)
    edges = [(x(low), y(low * (1 - BAND))), (x(high), y(high * (1 - BAND)))]
    edges += [(x(high), y(high * (1 + BAND))), (x(low), y(low * (1 + BAND)))]
    inside = element("path", class_="band", d=path(edges) + "z")
    inside += element("path", class_="ideal", d=path([(x(low), y(low)), (x(high), y(high))]))
    drawn = [axes(x, y, ("measured step time", "predicted step time"), (format_seconds, format_seconds))]
    drawn.append(clipped(x.start, y.end, x.end - x.start, y.start - y.end, inside))
    for i, name, got, expected in points:
        tooltip = f"{name}: predicted {format_seconds(expected)}, measured {format_seconds(got)}"
        drawn.append(mark(i, x(got), y(expected), tooltip))
    last = {i: (name, x(got), y(expected)) for i, name, got, expected in points}
    drawn.append(_labels([(i, *where) for i, where in last.items()], right + 10, y))
    within = sum(abs(expected / got - 1) <= BAND for _, _, got, expected in points)
    described = f"{within} of {len(points)} predictions are within {BAND:.0%} of the measured time."
    return drawing("Predicted and measured step time", described, WIDTH, 340, *drawn)


def part_swatch(name: str) -> str:
    """The pattern of a part of the step, for legends."""
    shape = element("rect", width=16, height=16, class_=f"part {name}")
    return element("svg", shape, viewBox="0 0 16 16", aria_hidden="true", class_="swatch")


def _line_chart(
    title: str,
    described: str,
    lines: Sequence[Curve],
    labels: tuple[str, str],
    show_x: Callable[[float], str],
    log: bool,
) -> str:
    right = WIDTH - _label_width([line.name for line in lines])
    xs = [p[0] for line in lines for p in line.points]
    low, high = (min(xs) / 1.1, max(xs)) if log else (0.0, max(xs))
    x = Scale(low, high if high > low else low + 1, 48, right, log)
    late = [v for line in lines for p in line.points[len(line.points) // 2 :] for v in p[1:]]
    y = Scale(*padded_range(late), 300, 28)
    inside, marks = [], []
    for line in lines:
        colour = f"c{line.index % COLOURS}"
        means = [(x(a), y(b)) for a, b, _, _ in line.points]
        edge = [(x(p[0]), y(p[3])) for p in line.points] + [(x(p[0]), y(p[2])) for p in reversed(line.points)]
        inside.append(element("path", class_=f"spread {colour}", d=path(edge) + "z"))
        style = f"line {colour}" + " dashed" * (line.index >= COLOURS)
        inside.append(element("path", element("title", text(line.name)), class_=style, d=path(means)))
        shown = dict.fromkeys([*means[:: max(1, math.ceil(len(means) / 6))], means[-1]])
        marks += [mark(line.index, *p) for p in shown if y.end <= p[1] <= y.start]
    drawn = [axes(x, y, labels, (show_x, lambda v: f"{v:g}"))]
    drawn.append(clipped(x.start, y.end, x.end - x.start, y.start - y.end, *inside))
    ends = [(line.index, line.name, x(line.points[-1][0]), y(line.points[-1][1])) for line in lines]
    return drawing(title, described, WIDTH, 340, *drawn, *marks, _labels(ends, right + 10, y))


def _bar(parts: Mapping[str, float], scale: Scale, top: float) -> str:
    """The parts in sequence; hidden communication, which adds no time, as a strip below the backward pass."""
    at, drawn = 0.0, []
    for name in (*PARTS, ""):
        value = parts.get(name, 0.0)
        if value <= 0:
            continue
        x, width = scale(at), scale(value)
        tooltip = element("title", text(f"{name or 'step'}: {format_seconds(value)}"))
        drawn.append(element("rect", tooltip, class_=f"part {name}", x=x, y=top, width=width, height=18.0))
        if width > 6.2 * len(name) + 6:
            drawn.append(label(name, f"inside {name}", x + width / 2, top + 13, "middle"))
        at += value
        if name == "backward" and parts.get("hidden"):
            hidden = min(scale(parts["hidden"]), scale(at))
            tooltip = f"exchange hidden behind the backward pass: {format_seconds(parts['hidden'])}"
            drawn.append(element(
                "rect", element("title", text(tooltip)), class_="part hidden", x=scale(at) - hidden, y=top + 19,
                width=hidden, height=5.0,
            ))  # fmt: skip
    return "".join(drawn)


def _labels(ends: Sequence[tuple[int, str, float, float]], x: float, y: Scale) -> str:
    """Labels beside the plot, without overlap, each with a thin line to its point."""
    drawn = []
    places = separate([end[3] for end in ends], 15, y.end, y.start)
    for (index, name, at_x, at_y), place in zip(ends, places, strict=True):
        colour = f"c{index % COLOURS}"
        drawn.append(element("path", class_=f"leader {colour}", d=path([(at_x + 5, at_y), (x - 3, place)])))
        drawn.append(label(_shortened(name), f"label {colour}", x, place + 4))
    return "".join(drawn)


def _label_width(names: Sequence[str]) -> float:
    return 6.9 * max(len(_shortened(name)) for name in names) + 14


def _shortened(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}…"
