"""`page`: a self-contained HTML page, without external fonts, scripts or images. `charts.js` draws its charts with uPlot."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from .bench_folder import NO_EXCHANGE
from .charts import Charts
from .comparison import Comparison
from .curves import curve_spec
from .export import right_aligned
from .headline import headline
from .method_colour import method_colour
from .step_bars import step_bars
from .tables import Cell, Table, all_results, breakdown, predicted, ranks, settings, setup
from .verdict import verdict

_LINKS = Template(
    '<li><a href="#$id-methods">Methods</a></li><li><a href="#$id-time">Step time</a></li>'
    '<li><a href="#$id-curves">Training curves</a></li><li><a href="#$id-layers">Layers</a></li>'
    '<li><a href="#$id-setup">Setup and settings</a></li>'
)


def page(comparisons: Sequence[Comparison], title: str) -> str:
    """The page of a report. Missing data is stated in its place."""
    charts, several = Charts(), len(comparisons) > 1
    sections, contents, verdicts = "", "", ""
    for n, comparison in enumerate(comparisons):
        name, links = escape(comparison.title), _LINKS.substitute(id=f"part{n}")
        sections += _section(comparison, f"part{n}", charts)
        contents += f'<li><a href="#part{n}">{name}</a><ul>{links}</ul></li>' if several else links
        about = f"<span>{name}</span>" if several else ""
        verdicts += f'<p class="verdict">{about}{escape(verdict(comparison))}</p>'
    library = f"/*\n{_asset('uplot/LICENSE')}\n*/\n{_asset('uplot/uPlot.iife.min.js')}"
    return Template(_asset("page.html")).substitute(
        title=escape(title), verdicts=verdicts, contents=contents, sections=sections, data=charts.as_json(),
        style=_asset("uplot/uPlot.min.css") + _asset("page.css"), library=library,
        script=_asset("charts.js") + _asset("page.js"),
    )  # fmt: skip


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _section(comparison: Comparison, id_: str, charts: Charts) -> str:
    more = [table for table in (all_results(comparison), settings(comparison)) if table]
    return Template(_asset("section.html")).substitute(
        id=id_,
        title=escape(comparison.title),
        methods=_table(headline(comparison)),
        time=_time(comparison),
        curves=_curves(comparison, charts),
        layers=_layers(comparison, charts),
        setup=_table(setup(comparison)) + "".join(_folded(table.title, _table(table)) for table in more),
    )


def _time(comparison: Comparison) -> str:
    drawn, table = step_bars(comparison), breakdown(comparison)
    note = "Shorter is better." if table else "No run recorded the parts of a step."
    figures = _figures([("Step time of each method", note, drawn)]) if drawn else ""
    missing = "" if drawn else _soft("No run recorded the time of a step.")
    return figures + missing + _table(table) + _table(predicted(comparison))


def _curves(comparison: Comparison, charts: Charts) -> str:
    main, label, _ = curve_spec(comparison)
    logged = {name for run in comparison.runs for name, rows in run.metrics.items() if len(rows) > 1}
    names = dict.fromkeys((main, "loss", *(name for run in comparison.runs for name in run.metrics)))
    drawn = {name: chart for name in names if name in logged and (chart := charts.curve(comparison, name))}
    shown = [(label if n == main else n, "", drawn.pop(n)) for n in (main, "loss") if n in drawn]
    if not shown and not drawn:
        return _soft(f"No run has rows “{main}” or “loss”, so there are no curves.")
    several = any(len(method.finished) > 1 for method in comparison.methods)
    note = "Mean over seeds, with a band from the lowest to the highest seed. " * several
    note += (
        "Drag to zoom, double-click to see all, click a name to switch a method off. On a linear scale the second half of the "
        "runs sets the range; earlier values can lie outside. Dashed vertical lines: the switch."
    )
    more = [(name, "", chart) for name, chart in drawn.items()]
    folded = _folded(f"{len(more)} more logged values", _figures(more)) if more else ""
    return f'{_soft(note)}<div class="axes"></div>{_figures(shown)}{folded}'  # the script fills the axes


def _layers(comparison: Comparison, charts: Charts) -> str:
    drawn, table = charts.ranks(comparison), ranks(comparison)
    if drawn is None:
        return _soft("No run recorded low-rank layers.")
    figure = ("Rank of each layer", "In per cent of the full rank, for the first seed.", drawn)
    return _figures([figure]) + _folded("Ranks as a table", _table(table))


def _table(table: Table | None) -> str:
    """A table with row headings; cells carry their values as `data-value`, for sorting."""
    if table is None:
        return ""
    right = right_aligned(table)
    heads = [
        f'<th scope="col"{" class=n" * r}>{escape(name)}</th>'
        for name, r in zip(table.columns, right, strict=True)
    ]
    rows = ""
    for first, *others in table.rows:
        mark = _swatch(first.text) if table.columns[0] == "method" else ""
        name = escape(first.text).replace("+", "+<wbr>")
        cells = "".join(_cell(cell, r) for cell, r in zip(others, right[1:], strict=True))
        rows += f'<tr><th scope="row">{mark}{name}</th>{cells}</tr>'
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    title = escape(table.title)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><caption>{title}</caption>'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{rows}</tbody></table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _swatch(method: str) -> str:
    """A method's colour; a bound has none."""
    if method == NO_EXCHANGE:
        return '<i class="swatch bound" aria-hidden="true"></i>'
    light, dark = method_colour(method)
    return f'<i class="swatch" style="--light:{light};--dark:{dark}" aria-hidden="true"></i>'


def _cell(cell: Cell, right: bool) -> str:
    kinds = ["n"] * right + [cell.tone] * bool(cell.tone) + ["wrap"] * (len(cell.text) > 40)
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f'<td class="{" ".join(kinds)}"{value}>{escape(cell.text)}</td>'


def _figures(figures: Sequence[tuple[str, str, str]]) -> str:
    """Drawings beside each other, each with a title and a note."""
    drawn = "".join(
        f"<figure><figcaption><b>{escape(title)}</b>{escape(note)}</figcaption>{drawing}</figure>"
        for title, note, drawing in figures
    )
    return f'<div class="figures">{drawn}</div>'


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def _soft(message: str) -> str:
    return f'<p class="soft">{escape(message)}</p>'
