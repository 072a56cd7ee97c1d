"""Read, write and check files, with errors that name the file."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
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


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file that is renamed to `path` when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # tempfile ignores the umask
    try:
        yield fresh
        sync(fresh)
        fresh.replace(path)
    except OSError as error:
        if error.filename == str(fresh):  # name the file as the user knows it
            error.filename = str(path)
        raise
    finally:
        fresh.unlink(missing_ok=True)


def file_record(path: Path) -> dict[str, Any]:
    """What a manifest says about a file: its size in bytes and its SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def check_file(path: Path, record: Mapping[str, Any], contents: bool = True) -> None:
    """Raise ValueError unless a file is as its record says; without `contents`, only its size is compared."""
    if not path.is_file():
        raise ValueError(f"{path} is missing, but the manifest lists it")
    size = path.stat().st_size
    if size != record["bytes"]:
        raise ValueError(
            f"{path}: {size:,} bytes instead of {record['bytes']:,}; it is incomplete or damaged"
        )
    if contents and sha256(path) != record["sha256"]:
        raise ValueError(f"{path}: damaged, its SHA-256 differs from the one in the manifest")


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        with errors_name(path):
            os.fsync(number)
    finally:
        os.close(number)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
