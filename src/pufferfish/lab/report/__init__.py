"""Runs side by side: one page that opens anywhere, or the same figures as CSV, LaTeX or Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .export import as_csv, as_latex, as_markdown
from .groups import Comparison, comparisons, find
from .headline import headline
from .page import page
from .tables import Table, breakdown, predicted, progress, ranks, settings, setup

FORMATS = ("html", "csv", "latex", "markdown")


def report(
    runs: Iterable[str | Path],
    form: str = "html",
    *,
    title: str = "Training, compared",
    against: str | None = None,
    target: float | None = None,
) -> str:
    """A page or text that compares runs.

    Runs of one name are one method, told apart by their seeds. What ran on different tasks, links, machines or
    numbers of workers is compared apart.

    Args:
        runs: folders of runs, or folders with such folders below them.
        form: "html", "csv", "latex" or "markdown".
        against: the name that the others are compared with; bf16 or else dense by default.
        target: also show how long it took to this validation accuracy (or what the measure is), as it is shown.

    >>> import tempfile
    >>> from pufferfish.measure import RunLog
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, seconds in ("bf16", 2.0), ("pufferfish", 0.8):
    ...         with RunLog(f"{folder}/{name}", name=name) as log:
    ...             log.result(accuracy=0.9, seconds_a_step=seconds)
    ...     text = report([folder], "markdown")
    >>> [line for line in text.splitlines() if line.startswith("| pufferfish")][0]
    '| pufferfish | – | 90.00 | +0.00 | 800 ms | 2.50× | – | – | – | – | 1 |'
    """
    if form not in FORMATS:
        raise ValueError(f"form={form!r}: there are {', '.join(FORMATS)}")
    found = comparisons(find(runs), against)
    if form == "html":
        return page(found, title, target)
    made = [
        table for comparison in found for table in _tables(comparison, target, len(found) > 1, form == "csv")
    ]
    return {"csv": as_csv, "latex": as_latex, "markdown": as_markdown}[form](made)


def write(text: str, out: str | Path) -> None:
    """To a file, whole or not at all."""
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{path}: {what}; name a file to write the report to")
    aside = path.with_name(f".{path.name}.new")
    try:
        aside.write_text(text, encoding="utf-8", newline="")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _tables(comparison: Comparison, target: float | None, several: bool, everything: bool) -> list[Table]:
    """The curves, hundreds of lines, are for CSV alone."""
    made = [headline(comparison, target), breakdown(comparison), ranks(comparison), predicted(comparison)]
    made += [setup(comparison), settings(comparison)] + [progress(comparison)] * everything
    where = f" ({comparison.title})" if several else ""
    return [replace(table, title=table.title + where) for table in made if table is not None]


__all__ = ["FORMATS", "report", "write"]
