"""`watch`: rewrites a page while its runs go on."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ...measure.saved_run import METRICS_FILE, RUN_FILE
from .bench_folder import SUMMARY

#: Seconds after which a page that is being watched loads itself again.
REFRESH = 5.0


def watch(
    paths: Iterable[str | Path],
    write_page: Callable[[float | None], None],
    say: Callable[[str], None],
    wait: Callable[[], None] = lambda: time.sleep(2),
) -> None:
    """Call `write_page` whenever files of the runs change, until interrupted; then once more, for a page that stays.

    Args:
        paths: folders of runs, or folders with such folders below them, or files.
        write_page: gets the seconds after which the page is to load itself again.
        say: gets the reason if there is no page yet.
        wait: called between two looks.
    """
    seen, problem = None, ""
    try:
        while True:
            if (now := _stamps(paths)) != seen:
                seen = now
                try:
                    write_page(REFRESH)
                    problem = ""
                except ValueError as error:  # not there yet, or being replaced
                    if str(error) != problem:
                        problem = str(error)
                        say(f"waiting: {problem}")
            wait()
    except KeyboardInterrupt:
        if not problem:
            write_page(None)


def _stamps(paths: Iterable[str | Path]) -> dict[Path, tuple[int, int]]:
    """Time of change and size of each file that a report reads."""
    stamps = {}
    for path in map(Path, paths):
        names = (RUN_FILE, METRICS_FILE, SUMMARY)
        for file in [path] if path.is_file() else [x for name in names for x in path.rglob(name)]:
            try:
                status = file.stat()
            except FileNotFoundError:  # replaced just now
                continue
            stamps[file] = (status.st_mtime_ns, status.st_size)
    return stamps
