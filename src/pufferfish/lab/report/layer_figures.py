"""Figures of the layers: their ranks, and their singular values before and after the switch."""

from collections.abc import Mapping

from .comparison import Comparison, recorded_layers
from .figures import WIDTH
from .formatting import format_number
from .svg import Scale, drawing, element, label, mark, padded_range, path, text
from .tables import is_low_rank


def rank_dots(comparison: Comparison) -> str | None:
    """Rank of each layer as a fraction of its full rank, with a mark for each low-rank method."""
    methods = [(i, method) for i, method in enumerate(comparison.methods) if is_low_rank(method)]
    layers = {i: recorded_layers(method.runs[0]) for i, method in methods}
    names = list(dict.fromkeys(layer["name"] for each in layers.values() for layer in each))
    if not names:
        return None
    left, row = min(7.0 * max(map(len, names)), 170.0) + 8, 12.0 + 5 * min(len(methods), 4)
    x = Scale(0, 1, left, WIDTH - 16)
    bottom = row * len(names) + 6
    drawn = [element("path", class_="grid", d=f"M{x(t):.1f} 0V{bottom:.1f}") for t in (0, 0.25, 0.5, 0.75, 1)]
    for t in (0, 0.25, 0.5, 0.75, 1):
        drawn.append(label(f"{t:.0%}", "tick", x(t), bottom + 15, "middle"))
    for n, name in enumerate(names):
        y = row * n + row / 2 + 3
        shown = name if len(name) <= 24 else f"…{name[-23:]}"
        inside = text(shown) + element("title", text(name))
        drawn.append(element("text", inside, class_="tick", x=left - 8, y=y + 4, text_anchor="end"))
    for n, (i, method) in enumerate(methods):
        # An offset for each method, so that equal ranks do not overlap.
        offset = (row - 9) * (n - (len(methods) - 1) / 2) / max(len(methods) - 1, 1)
        for layer in layers[i]:
            rank, full = layer.get("rank"), layer.get("full_rank") or 1
            y = row * names.index(layer["name"]) + row / 2 + 3 + offset
            shown = f"rank {rank} of {full}" if rank else "full rank"
            tooltip = f"{method.name}, {layer['name']}: {shown}"
            drawn.append(mark(i, x(rank / full if rank else 1.0), y, tooltip))
    drawn.append(label("fraction of the full rank", "name", x(0.5), bottom + 33, "middle"))
    described = f"{len(names)} layers; methods: {', '.join(method.name for _, method in methods)}."
    return drawing("Rank of each layer", described, WIDTH, bottom + 40, *drawn)


def spectrum(layer: Mapping[str, object]) -> str | None:
    """Singular values of a layer before and after the switch, on a logarithmic scale."""
    lines = {}
    for name in ("before", "after"):
        values = layer.get(f"spectrum_{name}")
        if isinstance(values, list | tuple) and (positive := [float(s) for s in values if s > 0]):
            lines[name] = positive
    if not lines:
        return None
    largest = max(map(max, lines.values()))
    lines = {name: [max(v, largest * 1e-4) for v in values] for name, values in lines.items()}
    low, high = padded_range([v for values in lines.values() for v in values], log=True)
    y = Scale(low, high, 66, 4, log=True)
    x = Scale(0, max(max(map(len, lines.values())) - 1, 1), 2, 118)
    drawn = [element("path", class_="axis", d="M2 68H118")]
    described = []
    for name, values in lines.items():
        points = [(x(n), y(v)) for n, v in enumerate(values)]
        drawn.append(element("path", class_=f"line {name}", d=path(points)))
        described.append(f"{name} from {format_number(values[0])} to {format_number(values[-1])}")
    return drawing(f"Singular values of {layer.get('name')}", f"{'; '.join(described)}.", 120, 70, *drawn)
