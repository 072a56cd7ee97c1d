"""`Charts`: the data of the page's charts, as JSON that its script draws. See `charts.js` for what is done with it."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .comparison import Comparison, recorded_layers
from .curves import MAX_POINTS, curve_spec, mean_curves, switch_marks
from .formatting import format_number
from .method_colour import method_colour, method_dash
from .tables import is_low_rank

_FEWER_POINTS = 80  # per curve of a chart that is folded at first


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
        scale, most = (metric.scale, MAX_POINTS) if name == main else (1.0, _FEWER_POINTS)
        lines, ends = [], []
        for method in comparison.methods:
            marks = [mark._asdict() for run in method.runs[:1] for mark in switch_marks(run)]
            for curve in mean_curves(method, name, scale, most):
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
        unit = "seconds" if name.startswith("time/") else "bytes" if name == "bytes" else "number"
        spec = {"kind": "curve", "label": shown, "values": unit}
        return self._add(spec | {"lines": lines}, f"{shown}, mean over seeds. {'; '.join(ends)}.")

    def ranks(self, comparison: Comparison) -> str | None:
        """Rank of each layer in per cent of its full rank, for methods with low-rank layers."""
        layers = {
            method.name: {layer["name"]: layer for layer in recorded_layers(method.runs[0])}
            for method in comparison.methods
            if is_low_rank(method)
        }
        names = list(dict.fromkeys(name for each in layers.values() for name in each))
        if not names:
            return None
        lines = []
        for method, each in layers.items():
            shares = [
                100 * layer["rank"] / (layer.get("full_rank") or 1)
                if (layer := each.get(name, {})).get("rank") else 100.0 if layer else None
                for name in names
            ]  # fmt: skip
            lines.append({"method": self._method(method), "y": _short(shares)})
        spec = {"kind": "ranks", "names": names, "lines": lines}
        return self._add(spec, f"{len(names)} layers; methods: {', '.join(layers)}.")

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

    def _add(self, spec: dict[str, Any], description: str) -> str:
        self._charts.append(spec)
        said, number = escape(description), len(self._charts) - 1
        return (
            f'<div class="chart {spec["kind"]}" data-chart="{number}" role="group" aria-label="{said}">'
            f'<p class="soft">{said}</p></div>'
        )


def _short(values: Sequence[float | None] | None) -> list[float | None] | None:
    """Numbers with five digits, to keep the page small."""
    return None if values is None else [None if x is None else float(f"{x:.5g}") for x in values]
