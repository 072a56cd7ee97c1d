"""Export of tables as CSV, LaTeX and Markdown."""

import csv
import io
import re
from collections.abc import Sequence

from .tables import Table

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "–": "--",
    "→": r"$\to$", "…": r"\dots{}", "µ": r"\textmu{}", "“": "``", "”": "''", "<": r"$<$", ">": r"$>$", "|": r"$|$",
}  # fmt: skip
#: What has a meaning in Markdown: inside of words `_` has none, and `#` only at their start.
_MARKDOWN = re.compile(r"[\\`*\[<|~$&]|(?<![^\W_])_|_(?![^\W_])|(?<!\S)#")


def as_csv(tables: Sequence[Table]) -> str:
    """CSV in long form, one line per cell, with full precision. Half-widths of intervals are columns of their own.

    >>> from pufferfish.lab.report.tables import Cell
    >>> print(as_csv([Table("T", ["method", "step time"], [[Cell("dense"), Cell("1.5 s", 1.5)]])]), end="")
    table,row,column,value
    T,1,method,dense
    T,1,step time,1.5
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "row", "column", "value"])
    for table in tables:
        for n, row in enumerate(table.rows, 1):
            for column, cell in zip(table.columns, row, strict=True):
                value = repr(cell.value) if cell.value is not None else "" if cell.text == "–" else cell.text
                writer.writerow([table.title, n, column, value])
                if cell.half is not None:
                    writer.writerow([table.title, n, f"{column} ±", repr(cell.half)])
    return out.getvalue()


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


def as_latex(tables: Sequence[Table]) -> str:
    r"""LaTeX tables, which need the packages booktabs and textcomp.

    >>> from pufferfish.lab.report.tables import Cell
    >>> print(as_latex([Table("T", ["method", "share"], [[Cell("a_b"), Cell("15 %", 0.15)]])]), end="")
    \begin{table}
    \centering
    \caption{T.}
    \begin{tabular}{lr}
    \toprule
    method & share \\
    \midrule
    a\_b & 15 \% \\
    \bottomrule
    \end{tabular}
    \end{table}
    """
    parts = []
    for table in tables:
        caption = " ".join([f"{latex(table.title)}.", *map(latex, table.notes)])
        alignment = "".join("r" if right else "l" for right in right_aligned(table))
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}"]
        lines += [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", _row(table.columns), r"\midrule"]
        lines += [_row([cell.text for cell in row]) for row in table.rows]
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n")
    return "\n".join(parts)


def latex(text: str) -> str:
    r"""Escape text for LaTeX, on one line.

    >>> latex("93.4 ± 0.1 %")
    '93.4 $\\pm$ 0.1 \\%'
    """
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def right_aligned(table: Table) -> list[bool]:
    """For each column, whether it holds numbers and is aligned to the right."""
    columns = [[row[n] for row in table.rows] for n in range(len(table.columns))]
    return [any(cell.value is not None for cell in column) for column in columns]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown, cells)) + " |"


def _paragraph(text: str) -> str:
    """Escape text that starts a line, so that it does not become a list or a quotation."""
    return re.sub(r"^(\d*)(?=[-+>.)])", r"\1\\", markdown(text))


def _row(cells: Sequence[str]) -> str:
    return " & ".join(map(latex, cells)) + r" \\"
