"""`report`: compares runs on one HTML page or in Markdown."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...planning.json_file import write_text
from .comparison import Comparison, compare_runs, find_runs
from .export import as_markdown
from .headline import headline
from .page import page
from .tables import Table, all_results, breakdown, predicted, ranks, settings, setup


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
    tables = [
        headline(comparison),
        breakdown(comparison),
        ranks(comparison),
        predicted(comparison),
    ]
    tables += [setup(comparison), all_results(comparison), settings(comparison)]
    suffix = f" ({comparison.title})" if several else ""
    return [replace(table, title=table.title + suffix) for table in tables if table is not None]
