"""Tables as Markdown."""

import re
from collections.abc import Sequence

from .tables import Table

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
