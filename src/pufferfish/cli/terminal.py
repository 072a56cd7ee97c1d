"""`show`, `say_starting` and `progress_bars`: results and progress on a terminal, by rich; plain text elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ..planning.text import Table

#: Colours of the words that a reader looks for.
_STYLES = {
    r"\d[\d.]*× (smaller|as fast|fewer bytes)": "green",
    r"\d[\d.]*× larger": "red",
    r"^Use [^:]+:": "bold green",
    r"^\d+: ": "dim",
}


def show(parts: Iterable[str | Table], *, wide: bool = False, console: Console | None = None) -> None:
    """Print paragraphs and tables, separated by empty lines.

    On a terminal, tables that are too wide lose their spare columns, and long lines are wrapped. Elsewhere the text is
    plain and complete.

    Args:
        wide: print plain and complete text on a terminal, too.
        console: where to print instead of standard output.
    """
    if wide or (console is None and not sys.stdout.isatty()):
        print("\n\n".join(map(str, parts)))
        return
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    for number, part in enumerate(parts):
        if number:
            console.print()
        if isinstance(part, str):
            text = Text(part)
            for pattern, style in _STYLES.items():
                text.highlight_regex(f"(?m){pattern}", style)
            console.print(text)
        else:
            _print_table(console, part)


def say_starting() -> None:
    """Say on a terminal that the command is starting: importing torch takes seconds. Workers of a job say nothing."""
    if sys.stderr.isatty() and "torch" not in sys.modules and "RANK" not in os.environ:
        print("starting …", file=sys.stderr, flush=True)


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[None]:
    """Show a bar with the remaining time for each long loop, on standard error if that is a terminal.

    Args:
        console: where to show them instead of standard error.
    """
    if console is None and not sys.stderr.isatty():
        yield
        return

    from ..planning.text import display_progress  # which imports torch

    stack = ExitStack()  # stops the bars of loops that an error has left

    @contextmanager
    def bar(text: str, total: float | None) -> Iterator[Callable[[float], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
        from rich.text import Text

        class Left(ProgressColumn):
            """The time left, once it is known; the time elapsed shows until then that the program runs."""

            def render(self, task: Task) -> Text:
                known = task.time_remaining is not None
                return Text(f"{timedelta(seconds=int(task.time_remaining or 0))} left" if known else "")

        name = TextColumn("{task.description}")
        shown = Progress(
            *(name, BarColumn(20), *[TaskProgressColumn()] * (total is not None), Elapsed(), Left()),
            console=console or Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            refresh_per_second=2,  # a loop may be timing something
        )
        stack.callback(shown.stop)
        with shown:
            task = shown.add_task(text, total=total)
            yield lambda amount: shown.advance(task, amount)

    with stack, display_progress(bar):
        yield


def _print_table(console: Console, table: Table) -> None:
    from rich import table as rich
    from rich.text import Text

    fitted = table.fitted(console.width)
    shown = rich.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    head, *rows = fitted.rows
    for i, name in enumerate(head):
        text_column = i in fitted.left
        shown.add_column(
            Text(name), justify="left" if text_column else "right", no_wrap=not text_column, overflow="fold"
        )
    for row in rows:
        cells = [Text(cell) for cell in row]
        for cell in cells:
            for pattern, style in _STYLES.items():
                cell.highlight_regex(pattern, style)
        shown.add_row(*cells)
    console.print(shown)
    missing = [name for name in table.rows[0] if name not in head]
    if missing:
        console.print(Text(f"left out: {', '.join(missing)}; --wide shows all", style="dim"))
