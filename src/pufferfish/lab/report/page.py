"""`page`: a self-contained HTML page, without external fonts, scripts or images. `charts.js` draws its charts with uPlot."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from .bench_folder import NO_EXCHANGE
from .charts import Charts, low_rank_methods
from .comparison import Comparison
from .curves import curve_spec
from .element import element, text
from .export import right_aligned
from .headline import headline
from .method_colour import method_colour
from .step_bars import step_bars
from .tables import Cell, Table, all_results, breakdown, predicted, ranks, settings, setup, summary
from .verdict import verdict

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
#: Parts of a comparison, by the end of their anchors.
_PARTS = {
    "methods": "Methods", "time": "Step time", "curves": "Training curves",
    "layers": "Layers", "setup": "Setup and settings",
}  # fmt: skip


def page(comparisons: Sequence[Comparison], title: str) -> str:
    """The page of a report. Missing data is stated in its place."""
    charts, one = Charts(), len(comparisons) == 1
    parts = [_section(c, len(comparisons), f"part{n}", charts) for n, c in enumerate(comparisons)]
    sections = [element("section", *part, id=f"part{n}") for n, part in enumerate(parts)]
    titles = ["" if one else element("span", text(c.title)) for c in comparisons]
    verdicts = [title + text(verdict(c)) for title, c in zip(titles, comparisons, strict=True)]
    body = [
        element("header", element("h1", text(title)),
                *(element("p", each, class_="verdict") for each in verdicts),
                element("p", text(_lead(comparisons)), class_="soft")),
        _contents(comparisons), element("noscript", element("p", "The charts need JavaScript; the tables do not.")),
        *sections,
    ]  # fmt: skip
    style = _asset("uplot/uPlot.min.css") + _asset("page.css")
    library = f"/*\n{_asset('uplot/LICENSE')}\n*/\n{_asset('uplot/uPlot.iife.min.js')}"
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{text(title)}</title><style>{style}</style></head><body>",
        element("main", *body), f'<script type="application/json" id="data">{charts.as_json()}</script>',
        f"<script>{library}</script>", f"<script>{_asset('charts.js')}{_asset('page.js')}</script></body></html>", "",
    ])  # fmt: skip


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _lead(comparisons: Sequence[Comparison]) -> str:
    """Number and days of the runs."""
    runs = [run for c in comparisons for run in c.runs if run.name != NO_EXCHANGE]
    days = sorted({run.started[:10] for run in runs if run.started})
    many = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return many + (f", {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else "")


def _contents(comparisons: Sequence[Comparison]) -> str:
    def links(n: int) -> str:
        items = [element("li", element("a", title, href=f"#part{n}-{end}")) for end, title in _PARTS.items()]
        return element("ul", *items)

    if len(comparisons) == 1:
        return element("nav", links(0), aria_label="Contents")
    items = [
        element("li", element("a", text(c.title), href=f"#part{n}"), links(n))
        for n, c in enumerate(comparisons)
    ]
    return element("nav", element("ul", *items), aria_label="Contents")


def _section(comparison: Comparison, sections: int, anchor: str, charts: Charts) -> list[str]:
    def heading(end: str) -> str:
        return element("h3", _PARTS[end], id=f"{anchor}-{end}")

    parts = [element("h2", text(comparison.title))] if sections > 1 else []
    parts.append(element("p", text(summary(comparison, with_title=sections == 1)), class_="soft"))
    parts.append(heading("methods"))
    parts.append(_table(headline(comparison)))
    parts += [heading("time"), *_time(comparison)]
    parts += [heading("curves"), *_curves(comparison, charts)]
    parts += [heading("layers"), *_layers(comparison, charts)]
    parts += [heading("setup"), _table(setup(comparison))]
    for table in (all_results(comparison), settings(comparison)):
        parts += [_folded(table.title, _table(table))] if table and table.rows else []
    return parts


def _time(comparison: Comparison) -> list[str]:
    drawn, table = step_bars(comparison), breakdown(comparison)
    if drawn:
        note = "Shorter is better." if table else "No run recorded the parts of a step."
        drawn = _beside([_figure("Step time of each method", note, drawn)])
    tables = (table, predicted(comparison))
    return [drawn or _missing("No run recorded the time of a step."), *(_table(each) for each in tables)]


def _curves(comparison: Comparison, charts: Charts) -> list[str]:
    main, label, _ = curve_spec(comparison)
    names = dict.fromkeys(
        name for run in comparison.runs for name, rows in run.metrics.items() if len(rows) > 1
    )
    first = [name for name in dict.fromkeys((main, "loss")) if name in names]
    shown = [
        _figure(label if name == main else name, "", drawn)
        for name in first
        if (drawn := charts.curve(comparison, name))
    ]
    if not shown:
        return [_missing(f"No run has rows “{main}” or “loss”, so there are no curves.")]
    several = any(len(method.finished) > 1 for method in comparison.methods)
    note = "Mean over seeds, with a band from the lowest to the highest seed. " * several
    note += (
        "Drag to zoom, double-click to see all, click a name to switch a method off. On a linear scale the second half of the "
        "runs sets the range; earlier values can lie outside. Dashed vertical lines: the switch."
    )
    others = [name for name in names if name not in first]
    more = [_figure(name, "", drawn) for name in others if (drawn := charts.curve(comparison, name))]
    folded = [_folded(f"{len(more)} more logged values", _beside(more))] if more else []
    bar = element("div", class_="axes")  # filled by the script
    return [element("p", text(note), class_="soft"), bar, _beside(shown), *folded]


def _layers(comparison: Comparison, charts: Charts) -> list[str]:
    methods = low_rank_methods(comparison)
    drawn, table = charts.ranks(methods), ranks(comparison)
    if drawn is None or table is None:
        return [_missing("No run recorded low-rank layers.")]
    figure = _figure("Rank of each layer", "In per cent of the full rank, for the first seed.", drawn)
    return [_beside([figure]), _folded("Ranks as a table", _table(table))]


def _table(table: Table | None) -> str:
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
        mark = _swatch(first.text) if table.columns[0] == "method" else ""
        cells = [element("th", mark, _name(first.text), scope="row")]
        cells += [_cell(cell, r) for cell, r in zip(others, right[1:], strict=True)]
        rows.append(element("tr", *cells))
    inside = element("caption", text(table.title)) + element("thead", element("tr", *heads))
    whole = element("table", inside, element("tbody", *rows))
    items = [element("li", text(note)) for note in table.notes]
    notes = element("ul", *items, class_="notes") if items else ""
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=table.title) + notes


def _swatch(method: str) -> str:
    """A method's colour; a bound has none."""
    light, dark = method_colour(method)
    if method == NO_EXCHANGE:
        return element("i", class_="swatch bound", aria_hidden="true")
    return element("i", class_="swatch", style=f"--light:{light};--dark:{dark}", aria_hidden="true")


def _name(name: str) -> str:
    """A name with an optional line break after each +."""
    return text(name).replace("+", "+<wbr>")


def _cell(cell: Cell, right: bool) -> str:
    kinds = ["n"] * right + [cell.tone] * bool(cell.tone)
    kinds += ["wrap"] * (len(cell.text) > 40)
    value = None if cell.value is None else repr(cell.value)
    return element("td", text(cell.text), class_=" ".join(kinds) or None, data_value=value)


def _figure(title: str, note: str, drawn: str) -> str:
    caption = element("figcaption", element("b", text(title)), text(note))
    return element("figure", caption, drawn)


def _beside(figures: Sequence[str]) -> str:
    return element("div", *figures, class_="figures") if figures else ""


def _folded(title: str, inside: str, opened: bool = False) -> str:
    return element("details", element("summary", text(title)), inside, **({"open": ""} if opened else {}))


def _missing(message: str) -> str:
    return element("p", text(message), class_="soft")
