"""`page`: a self-contained HTML page, without external fonts, scripts or images."""

from collections.abc import Sequence

from ...measure.breakdown import PARTS
from .bench_folder import NO_EXCHANGE
from .comparison import Comparison, recorded_layers
from .curves import curve_spec
from .equal_table import equal_tables
from .exchange_table import exchange_table
from .export import right_aligned
from .figures import bars, curves, part_swatch, scatter
from .headline import headline
from .highlights import highlights
from .layer_figures import rank_dots, spectrum
from .style import CSS, JS, PATTERNS
from .svg import element, swatch, text
from .tables import Cell, Table, breakdown, is_low_rank, predicted, ranks, settings, setup, summary

MAX_SPECTRA = 240  # per page, to stay below a megabyte
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(comparisons: Sequence[Comparison], title: str, target: float | None = None) -> str:
    """The page of a report. Missing data is stated in its place."""
    links = [element("a", text(c.title), href=f"#part{n}") for n, c in enumerate(comparisons)]
    parts = [_section(c, target, len(comparisons)) for c in comparisons]
    sections = [element("section", *part, id=f"part{n}") for n, part in enumerate(parts)]
    methods = [m for c in comparisons for group in (c.methods, *c.equal.values()) for m in group]
    found = {run.folder: run for m in methods for run in m.runs if run.name != NO_EXCHANGE}
    runs = list(found.values())
    days = sorted({run.started[:10] for run in runs if run.started})
    many = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    lead = many + (f", {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else "")
    body = [
        element("h1", text(title)), element("p", text(lead), class_="soft"),
        element("nav", *links, aria_label="Comparisons") if len(links) > 1 else "", *sections,
    ]  # fmt: skip
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{text(title)}</title><style>{CSS}</style></head><body>", PATTERNS,
        element("main", *body), f"<script>{JS}</script></body></html>", "",
    ])  # fmt: skip


def _section(comparison: Comparison, target: float | None, sections: int) -> list[str]:
    marks = {method.name: i for i, method in enumerate(comparison.methods)}
    parts = [element("h2", text(comparison.title))] if sections > 1 else []
    parts.append(element("p", text(summary(comparison, with_title=sections == 1)), class_="soft"))
    shown = highlights(comparison)
    if shown:
        cards = [
            element(
                "li", element("span", text(h.title)), element("b", text(h.figure)),
                element("span", _name(h.method), class_="who"), element("span", text(h.note)),
            ) for h in shown
        ]  # fmt: skip
        against = comparison.reference.name if comparison.reference else ""
        parts.append(element("p", text(f"Compared with {against}:")))
        parts.append(element("ul", *cards, class_="cards"))
    parts += [_table(table, marks) for table in (headline(comparison, target), *equal_tables(comparison))]
    parts += [element("h3", "Time"), *_time(comparison, marks)]
    parts += [element("h3", "Training curves"), *_curves(comparison)]
    parts += [element("h3", "Layers"), *_layers(comparison, MAX_SPECTRA // sections)]
    parts.append(_table(setup(comparison), {}))
    table = settings(comparison)
    return parts + [_folded("All settings", _table(table, {}))] * bool(table and table.rows)


def _time(comparison: Comparison, marks: dict[str, int]) -> list[str]:
    drawn, table = bars(comparison), breakdown(comparison)
    dots, beside = scatter(comparison), predicted(comparison)
    figures, missing = [], []
    if drawn:
        legend = [element("li", part_swatch(name), text(name)) for name in PARTS]
        hidden = "exchange hidden behind the backward pass, which adds no time"
        legend.append(element("li", part_swatch("hidden"), hidden))
        note = "Shorter is better." if table else "No run recorded the parts of a step."
        figures.append(_figure("Step time of each method", note, drawn, legend if table else ()))
    else:
        missing.append(_missing("No run recorded the time of a step."))
    if dots:
        note = "Step time, predicted by the cost model. Dashed line: exact. Band: within 20 %."
        figures.append(_figure("Predicted and measured", note, dots))
    else:
        missing.append(_missing("No run has both a predicted and a measured step time."))
    tables = (table, exchange_table(comparison), beside)
    return [_beside(figures), *missing, *(_table(each, marks) for each in tables)]


def _curves(comparison: Comparison) -> list[str]:
    rows, _, metric = curve_spec(comparison)
    several = any(len(method.runs) > 1 for method in comparison.methods)
    note = "Mean over seeds, with a band from the lowest to the highest seed. " * several
    note += "Early values can lie outside the plot."
    drawn, missing = [], []
    for over, axis, missed in (("time", "seconds", "measured times"), ("bytes", "bytes", "rows “bytes”")):
        if figure := curves(comparison, axis):
            drawn.append(_figure(f"{metric.words.capitalize()} over {over}", note, figure))
        else:
            missing.append(_missing(f"No curve over {over}: no run has {missed} for “{rows}”."))
    if not drawn:
        return [_missing(f"No run has rows “{rows}” or “loss”, so there are no curves.")]
    return [_beside(drawn), *missing]


def _layers(comparison: Comparison, max_spectra: int) -> list[str]:
    drawn, table = rank_dots(comparison), ranks(comparison)
    if drawn is None or table is None:
        return [_missing("No run recorded low-rank layers.")]
    methods = [(i, method) for i, method in enumerate(comparison.methods) if is_low_rank(method)]
    legend = [element("li", swatch(i), text(method.name)) for i, method in methods]
    note = "First seed only. A layer at 100 % has full rank."
    figures = [_figure("Rank of each layer", note, drawn, legend)]
    each = max(1, max_spectra // len(methods))
    folded: list[str] = []
    missing: list[str] = []
    for _, method in methods:
        layers = sorted(recorded_layers(method.runs[0]), key=lambda layer: layer.get("rank") is None)
        shown = [(layer, svg) for layer in layers[:each] if (svg := spectrum(layer))]
        if not shown:
            missing.append(_missing(f"{method.name}: no singular values recorded."))
            continue
        items = [element("li", svg, element("span", text(layer["name"]))) for layer, svg in shown]
        title = method.name + f", the first {each} of {len(layers)} layers" * (len(layers) > each)
        folded.append(_folded(title, element("ul", *items, class_="spectra"), opened=not folded))
    if folded:
        note = "Logarithmic scale, in descending order. Dashed: before the switch; solid: after it."
        figures.append(_figure("Singular values", note, "".join(folded)))
    return [_beside(figures), *missing, _folded("Ranks as a table", _table(table, {}))]


def _table(table: Table | None, marks: dict[str, int]) -> str:
    """A table with row headings; cells carry their values as `data-value`, for sorting."""
    if table is None:
        return ""
    right = right_aligned(table)
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
    items = [element("li", text(note)) for note in table.notes]
    notes = element("ul", *items, class_="notes") if items else ""
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=table.title) + notes


def _name(name: str) -> str:
    """A name with an optional line break after each +."""
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


def _missing(message: str) -> str:
    return element("p", text(message), class_="soft")
