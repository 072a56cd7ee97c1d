"""Read and write text and JSON files with errors that name the file."""

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parse_json(text: str, source: str = "text") -> Any:
    """Parse JSON; text that is not JSON is a ValueError.

    Args:
        source: source of the text, for the error.

    >>> parse_json('{"rank": 8}')
    {'rank': 8}
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}:{error.lineno}: not valid JSON: {error.msg}") from None


def read_json(path: Path) -> Any:
    """Read a JSON file; ValueError with the file's name if its contents are not JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None
    return parse_json(text, str(path))


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
