"""Read and write text and JSON files with errors that name the file."""

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Read a JSON file; ValueError with the file's name if its contents are not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of text that is not UTF-8
        raise ValueError(f"{path}: not valid JSON: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file. Unlike `Path.write_text`, an OSError of the write, such as a full disk, names the file."""
    with errors_name(path):
        path.write_text(text, encoding="utf-8", newline="")


@contextlib.contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError without one. Opening a file names it, writing to it does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; free some space or write to another disk" if full else ""
        raise OSError(error.errno, f"{error.strerror}{hint}", str(path)) from None
