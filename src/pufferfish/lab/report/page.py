"""One page of HTML that needs nothing else: no network, no fonts, no scripts but its own few lines."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...measure.breakdown import PARTS
from .bench_folder import CEILING
from .curves import charted
from .export import to_right
from .figures import bars, curves, part_swatch, scatter
from .findings import findings
from .groups import Comparison, layers_of
from .headline import headline
from .layer_figures import rank_dots, spectrum
from .style import CSS, JS, PATTERNS
from .svg import element, swatch, text
from .tables import Cell, Table, breakdown, low_rank, predicted, ranks, settings, setup, summary

MOST_SPECTRA = 240  # of a page, to stay below a megabyte
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(comparisons: Sequence[Comparison], title: str, target: float | None = None) -> str:
    """The whole page; what the runs do not say is said to be missing."""
    several = len(comparisons) > 1
    links = [element("a", text(c.title), href=f"#part{n}") for n, c in enumerate(comparisons)]
    sections = [
        element("section", *_section(c, target, several, len(comparisons)), id=f"part{n}")
        for n, c in enumerate(comparisons)
    ]
    runs = [run for c in comparisons for run in c.runs if run.name != CEILING]
    days = sorted({run.started[:10] for run in runs if run.started})
    many = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    lead = many + (f", {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else "")
    body = [
        element("h1", text(title)), element("p", text(lead), class_="soft"),
        element("nav", *links, aria_label="Comparisons") if several else "", *sections,
    ]  # fmt: skip
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{text(title)}</title><style>{CSS}</style></head><body>", PATTERNS,
        element("main", *body), f"<script>{JS}</script></body></html>", "",
    ])  # fmt: skip


def _section(comparison: Comparison, target: float | None, several: bool, parts: int) -> list[str]:
    marks = {group.name: i for i, group in enumerate(comparison.groups)}
    said = [element("h2", text(comparison.title))] if several else []
    said.append(element("p", text(summary(comparison, with_title=not several)), class_="soft"))
    found = findings(comparison)
    if found:
        cards = [
            element(
                "li", element("span", text(f.what)), element("b", text(f.figure)),
                element("span", _name(f.method), class_="who"), element("span", text(f.note)),
            ) for f in found
        ]  # fmt: skip
        against = comparison.reference.name if comparison.reference else ""
        said.append(element("p", text(f"Against {against}:")))
        said.append(element("ul", *cards, class_="cards"))
    said.append(_table(headline(comparison, target), marks))
    said += [element("h3", "Time"), *_time(comparison, marks)]
    said += [element("h3", "Progress"), *_progress(comparison)]
    said += [element("h3", "Layers"), *_layers(comparison, MOST_SPECTRA // parts)]
    said.append(_table(setup(comparison), {}))
    every = settings(comparison)
    return said + [_folded("All settings", _table(every, {}))] * bool(every and every.rows)


def _time(comparison: Comparison, marks: dict[str, int]) -> list[str]:
    drawn, table = bars(comparison), breakdown(comparison)
    dots, beside = scatter(comparison), predicted(comparison)
    figures, missing = [], []
    if drawn:
        legend = [element("li", part_swatch(name), text(name)) for name in PARTS]
        legend.append(
            element(
                "li", part_swatch("hidden"), "exchange hidden behind backward, which took no time of its own"
            )
        )
        note = "Shorter is better." if table else "No run says what the time went to."
        figures.append(_figure("A step of each method", note, drawn, legend if table else ()))
    else:
        missing.append(_missing("No run says how long a step takes."))
    if dots:
        note = "A step, by the cost model. On the dashed line it is right, in the band within 20 %."
        figures.append(_figure("Predicted against measured", note, dots))
    else:
        missing.append(_missing("No run has both a predicted and a measured time of a step."))
    return [_beside(figures), *missing, _table(table, marks), _table(beside, marks)]


def _progress(comparison: Comparison) -> list[str]:
    rows, _, measure = charted(comparison)
    several = any(len(group.runs) > 1 for group in comparison.groups)
    note = "Mean over seeds; the band goes from the lowest to the highest seed. " * several
    note += "Early values may lie outside the frame."
    drawn, missing = [], []
    for over, axis, lacks in (("time", "seconds", "times of its own"), ("bytes", "bytes", "rows “bytes”")):
        if figure := curves(comparison, axis):
            drawn.append(_figure(f"{measure.name.capitalize()} over {over}", note, figure))
        else:
            missing.append(_missing(f"No curve over {over}: no run has {lacks} beside “{rows}”."))
    if not drawn:
        return [_missing(f"No run has rows “{rows}” or “loss”, so there are no curves.")]
    return [_beside(drawn), *missing]


def _layers(comparison: Comparison, most: int) -> list[str]:
    drawn, table = rank_dots(comparison), ranks(comparison)
    if drawn is None or table is None:
        return [_missing("No run has low-rank layers in its record.")]
    methods = [(i, group) for i, group in enumerate(comparison.groups) if low_rank(group)]
    legend = [element("li", swatch(i), text(group.name)) for i, group in methods]
    figures = [
        _figure("Rank of every layer", "Of the first seed; at 100 % a layer is full-rank.", drawn, legend)
    ]
    each = max(1, most // len(methods))
    folded: list[str] = []
    missing: list[str] = []
    for _, group in methods:
        layers = sorted(layers_of(group.runs[0]), key=lambda layer: layer.get("rank") is None)
        shown = [(layer, svg) for layer in layers[:each] if (svg := spectrum(layer))]
        if not shown:
            missing.append(_missing(f"{group.name}: no spectra in its record."))
            continue
        items = [element("li", svg, element("span", text(layer["name"]))) for layer, svg in shown]
        title = (
            f"{group.name}, the first {each} of {len(layers)} layers" if len(layers) > each else group.name
        )
        folded.append(_folded(title, element("ul", *items, class_="spectra"), opened=not folded))
    if folded:
        note = "Logarithmic, the largest first: dashed before the switch, solid after it."
        figures.append(_figure("Singular values", note, "".join(folded)))
    return [_beside(figures), *missing, _folded("Ranks as a table", _table(table, {}))]


def _table(table: Table | None, marks: dict[str, int]) -> str:
    """With row heads; the numbers behind the cells lie beside them, for sorting."""
    if table is None:
        return ""
    right = to_right(table)
    heads = [
        element("th", text(name) or " ", scope="col", class_="n" if r else None)
        for name, r in zip(table.columns, right, strict=True)
    ]
    rows = []
    for first, *others in table.rows:
        mark = swatch(marks[first.text]) if first.text in marks else ""
        cells = [element("th", mark, _name(first.text), scope="row")]
        cells += [_cell(cell, r) for cell, r in zip(others, right[1:], strict=True)]
        rows.append(element("tr", *cells))
    inside = element("caption", text(table.title)) + element("thead", element("tr", *heads))
    whole = element("table", inside, element("tbody", *rows))
    notes = (
        element("ul", *(element("li", text(note)) for note in table.notes), class_="notes")
        if table.notes
        else ""
    )
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=table.title) + notes


def _name(name: str) -> str:
    """It may be broken between joined methods."""
    return text(name).replace("+", "+<wbr>")


def _cell(cell: Cell, right: bool) -> str:
    kinds = ["n"] * right + [cell.tone] * bool(cell.tone) + ["bar"] * (cell.share is not None)
    kinds += ["wrap"] * (len(cell.text) > 40)
    value = None if cell.value is None else repr(cell.value)
    style = None if cell.share is None else f"--share:{cell.share:.3f}"
    return element("td", text(cell.text), class_=" ".join(kinds) or None, data_value=value, style=style)


def _figure(title: str, note: str, drawn: str, legend: Sequence[str] = ()) -> str:
    caption = element("figcaption", element("b", text(title)), text(note))
    keys = element("ul", *legend, class_="legend") if legend else ""
    return element("figure", caption, keys, drawn)


def _beside(figures: Sequence[str]) -> str:
    return element("div", *figures, class_="figures") if figures else ""


def _folded(title: str, inside: str, opened: bool = False) -> str:
    return element("details", element("summary", text(title)), inside, **({"open": ""} if opened else {}))


def _missing(what: str) -> str:
    return f'<p class="soft">{escape(what, quote=False)}</p>'
