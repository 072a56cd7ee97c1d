"""`report`: a comparison of runs as an HTML page or as Markdown tables."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template

from ...planning.json_file import write_text
from .charts import Charts, curve_spec, method_colour
from .comparison import NO_EXCHANGE, Comparison, compare_runs, find_runs
from .tables import Cell, Table, headline, setup, verdict


def report(
    runs: Iterable[str | Path],
    *,
    markdown: bool = False,
    title: str = "Comparison of training runs",
    against: str | None = None,
) -> str:
    """Compare runs and return the report as text.

    Runs with the same name are one method, with one run per seed; a second run of a seed has its folder after the name.
    Runs on different tasks, links, machines or numbers
    of workers are compared separately.

    Args:
        runs: folders of runs, or folders with such folders below them.
        markdown: return Markdown tables instead of a page.
        title: heading of the HTML page.
        against: name of the reference method; by default bf16, or dense if there is no bf16.

    >>> import tempfile
    >>> from pufferfish.measure import RunLog
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, seconds in ("bf16", 2.0), ("pufferfish", 0.8):
    ...         with RunLog(f"{folder}/{name}", name=name) as log:
    ...             log.result(accuracy=0.9, seconds_a_step=seconds)
    ...     text = report([folder], markdown=True)
    >>> [line for line in text.splitlines() if line.startswith("| pufferfish")][0]
    '| pufferfish | – | 90.00 | +0.00 | 800 ms | 2.50× | – | – | – | – | 1 |'
    """
    comparisons = compare_runs(find_runs(runs), against)
    if not markdown:
        return page(comparisons, title)
    several = len(comparisons) > 1
    return as_markdown([table for c in comparisons for table in _tables(c, several)])


def write(text: str, out: str | Path) -> None:
    """Write a file atomically."""
    path = Path(out)
    temporary = path.with_name(f".{path.name}.new")
    try:
        write_text(temporary, text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _tables(comparison: Comparison, several: bool) -> list[Table]:
    suffix = f" ({comparison.title})" if several else ""
    return [replace(table, title=table.title + suffix) for table in (headline(comparison), setup(comparison))]


_LINKS = Template(
    '<li><a href="#$id-methods">Methods</a></li><li><a href="#$id-curves">Training curves</a></li>'
    '<li><a href="#$id-setup">Setup</a></li>'
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
    return Template(_asset("section.html")).substitute(
        id=id_,
        title=escape(comparison.title),
        methods=_table(headline(comparison)),
        curves=_curves(comparison, charts),
        setup=_table(setup(comparison)),
    )


def _curves(comparison: Comparison, charts: Charts) -> str:
    main, label, _ = curve_spec(comparison)
    logged = {name for run in comparison.runs for name, rows in run.metrics.items() if len(rows) > 1}
    names = [name for name in dict.fromkeys((main, "loss")) if name in logged]
    drawn = [(name, chart) for name in names if (chart := charts.curve(comparison, name))]
    if not drawn:
        return _soft(f"No run has rows “{main}” or “loss”, so there are no curves.")
    several = any(len(method.finished) > 1 for method in comparison.methods)
    note = "Mean over seeds, with a band from the lowest to the highest seed. " * several
    note += (
        "Drag to zoom, double-click to see all, click a name to switch a method off. On a linear scale the second half of the "
        "runs sets the range; earlier values can lie outside. Dashed vertical lines: the switch."
    )
    figures = "".join(
        f"<figure><figcaption><b>{escape(label if name == main else name)}</b></figcaption>{chart}</figure>"
        for name, chart in drawn
    )
    return f'{_soft(note)}<div class="axes"></div><div class="figures">{figures}</div>'  # the script fills the axes


def _table(table: Table) -> str:
    """A table with row headings; cells carry their values as `data-value`, for sorting."""
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


def _soft(message: str) -> str:
    return f'<p class="soft">{escape(message)}</p>'


#: What has a meaning in Markdown: inside of words `_` has none, and `#` only at their start.
_MARKDOWN = re.compile(r"[\\`*\[<|~$&]|(?<![^\W_])_|_(?![^\W_])|(?<!\S)#")


def as_markdown(tables: Sequence[Table]) -> str:
    """Markdown tables.

    >>> from pufferfish.lab.report.tables import Cell
    >>> print(as_markdown([Table("T", ["method", "step time"], [[Cell("dense"), Cell("1.5 s", 1.5)]])]), end="")
    ## T
    <BLANKLINE>
    | method | step time |
    |---|--:|
    | dense | 1.5 s |
    """
    parts = []
    for table in tables:
        lines = [f"## {markdown(table.title)}", "", _line(table.columns)]
        lines.append("|" + "|".join("--:" if right else "---" for right in right_aligned(table)) + "|")
        lines += [_line([cell.text for cell in row]) for row in table.rows]
        lines += [text for note in table.notes for text in ("", _paragraph(note))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def markdown(text: str) -> str:
    r"""Escape text for Markdown, on one line.

    >>> print(markdown("[a|b](c) weight_decay *x* <b>"))
    \[a\|b](c) weight_decay \*x\* \<b>
    """
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))


def right_aligned(table: Table) -> list[bool]:
    """For each column, whether it holds numbers and is aligned to the right."""
    columns = [[row[n] for row in table.rows] for n in range(len(table.columns))]
    return [any(cell.value is not None for cell in column) for column in columns]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown, cells)) + " |"


def _paragraph(text: str) -> str:
    """Escape text that starts a line, so that it does not become a list or a quotation."""
    return re.sub(r"^(\d*)(?=[-+>.)])", r"\1\\", markdown(text))
