"""`terminal_table`: the results of a bench as a text table."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ...planning.text import Table
from ..report.comparison import Comparison, compare_runs, find_runs
from ..report.formatting import format_bytes
from ..report.headline import headline

#: Columns by their first words, the least important first.
_SPARE = (
    "seeds", "MACs", "peak memory", "peak rate", "largest exchange", "bytes per round", "bytes per step", "run time",
    "run speedup", "parameters", "utilisation", "difference", "step speedup", "step time",
)  # fmt: skip


def terminal_table(root: Path, width: int | None = None) -> str:
    """The main table of the page as text; empty columns are left out.

    Args:
        width: leave out more columns, the least important first, where the table is wider than this.
    """
    return "\n\n".join(_table(comparison, width) for comparison in compare_runs(find_runs([root])))


def _table(comparison: Comparison, width: int | None) -> str:
    found, reference = headline(comparison), comparison.reference
    title, against = comparison.title, ""
    if reference:
        title, against = f"{title}, compared with {reference.name}", f" vs. {reference.name}"
    heads = [head.removesuffix(against) for head in found.columns]
    texts = [[cell.text for cell in row] for row in found.rows]
    columns = [c for c in zip(heads, *texts, strict=True) if {*c[1:]} - {"–", format_bytes(0)}]
    spare = [head for name in _SPARE for head in heads if head.startswith(name)]
    spare.append(comparison.metric.label)  # after all the others, so that any table fits
    whole = Table([*zip(*columns, strict=True)], left=(0,), spare=spare)
    table = whole if width is None else whole.fitted(width)
    missing = [head for head in whole.rows[0] if head not in table.rows[0]]
    hint = [f"left out: {', '.join(missing)}; the page shows all"] * bool(missing)

    def fill(texts: Sequence[str]) -> list[str]:
        return [text if width is None else textwrap.fill(text, width) for text in texts]

    return "\n".join([*fill([title]), "", str(table), *fill(hint), "", *fill(found.notes)])
