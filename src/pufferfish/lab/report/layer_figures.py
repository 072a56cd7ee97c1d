"""Figures of what became of the layers: their ranks, and their singular values before and after."""

from __future__ import annotations

from collections.abc import Mapping

from .figures import WIDTH
from .groups import Comparison, layers_of
from .numbers import significant
from .svg import Scale, around, drawing, element, mark, path, text
from .tables import low_rank


def rank_dots(comparison: Comparison) -> str | None:
    """Each layer's rank as a share of its full rank, a mark for each low-rank method."""
    methods = [(i, group) for i, group in enumerate(comparison.groups) if low_rank(group)]
    names = list(dict.fromkeys(layer["name"] for _, group in methods for layer in layers_of(group.runs[0])))
    if not names:
        return None
    left, row = min(7.0 * max(map(len, names)), 170.0) + 8, 12.0 + 5 * min(len(methods), 4)
    x = Scale(0, 1, left, WIDTH - 16)
    bottom = row * len(names) + 6
    drawn = [element("path", class_="grid", d=f"M{x(t):.1f} 0V{bottom:.1f}") for t in (0, 0.25, 0.5, 0.75, 1)]
    for t in (0, 0.25, 0.5, 0.75, 1):
        drawn.append(element("text", f"{t:.0%}", class_="tick", x=x(t), y=bottom + 15, text_anchor="middle"))
    for n, name in enumerate(names):
        y = row * n + row / 2 + 3
        shown = name if len(name) <= 24 else f"…{name[-23:]}"
        inside = text(shown) + element("title", text(name))
        drawn.append(element("text", inside, class_="tick", x=left - 8, y=y + 4, text_anchor="end"))
    for n, (i, group) in enumerate(methods):
        aside = (row - 9) * (n - (len(methods) - 1) / 2) / max(len(methods) - 1, 1)  # equal ranks stay apart
        for layer in layers_of(group.runs[0]):
            rank, full = layer.get("rank"), layer.get("full_rank") or 1
            y = row * names.index(layer["name"]) + row / 2 + 3 + aside
            label = f"{group.name}, {layer['name']}: " + (f"rank {rank} of {full}" if rank else "full rank")
            drawn.append(mark(i, x(rank / full if rank else 1.0), y, label))
    drawn.append(
        element(
            "text", "share of the full rank", class_="name", x=x(0.5), y=bottom + 33, text_anchor="middle"
        )
    )
    described = f"{len(names)} layers under {', '.join(group.name for _, group in methods)}."
    return drawing("Rank of every layer", described, WIDTH, bottom + 40, *drawn)


def spectrum(layer: Mapping[str, object]) -> str | None:
    """A layer's singular values before and after, on a logarithmic scale."""
    named = [("before", layer.get("spectrum_before")), ("after", layer.get("spectrum_after"))]
    lines = {
        name: kept
        for name, v in named
        if isinstance(v, list | tuple) and (kept := [float(s) for s in v if s > 0])
    }
    if not lines:
        return None
    largest = max(map(max, lines.values()))
    lines = {name: [max(v, largest * 1e-4) for v in values] for name, values in lines.items()}
    low, high = around([v for values in lines.values() for v in values], log=True)
    y = Scale(low, high, 66, 4, log=True)
    x = Scale(0, max(max(map(len, lines.values())) - 1, 1), 2, 118)
    drawn = [element("path", class_="axis", d="M2 68H118")]
    for name, values in lines.items():
        drawn.append(
            element("path", class_=f"line {name}", d=path([(x(n), y(v)) for n, v in enumerate(values)]))
        )
    said = "; ".join(f"{n} from {significant(v[0])} to {significant(v[-1])}" for n, v in lines.items())
    return drawing(f"Singular values of {layer.get('name')}", f"{said}.", 120, 70, *drawn)
