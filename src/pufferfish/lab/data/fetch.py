"""`fetch`: a dataset from its home. Goes on where it stopped, checks what came, and leaves no half file under its name."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from ...lowrank.files import sha256, sync
from .dataset import Dataset, Download

TIMEOUT = 60.0  # seconds without a byte
_PIECE = 1 << 16


def fetch(dataset: Dataset, folder: Path) -> Path:
    """Download what `dataset` consists of into a folder of its name in `folder`; what is there already stays.

    Returns:
        That folder.
    """
    target = folder / dataset.name
    target.mkdir(parents=True, exist_ok=True)
    for download in dataset.downloads:
        if not (target / download.file).is_file():
            _get(download, target / download.file)
    return target


def _get(download: Download, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    while True:
        before, reason = _size(part), "it broke off"
        try:
            total = _receive(download, part)
            if total is None or _size(part) >= total:
                break
        except (OSError, http.client.HTTPException) as error:
            reason = _reason(error)
        if _size(part) > before:
            continue  # it broke, but it gets on
        kept = f"; {_size(part):,} bytes are kept, the next attempt goes on from there" if _size(part) else ""
        raise OSError(
            f"{download.url}: {reason}{kept}; or put {download.file} into {path.parent} yourself"
        ) from None
    problem = _wrong(download, part)
    if problem:
        part.unlink()
        raise ValueError(f"{download.url}: {problem}; what came was removed, nothing else changed")
    sync(part)
    part.rename(path)


def _receive(download: Download, part: Path) -> int | None:
    """Write what the server sends until it stops; returns how long the file is, if that is known."""
    done = _size(part)
    headers = {"User-Agent": "pufferfish", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        reply = urllib.request.urlopen(urllib.request.Request(download.url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return done  # there is no more of it: the checksum tells whether that is all
        raise
    with reply:
        if reply.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0  # a server that cannot go on sends all of it
        elif not reply.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            raise OSError("the server sent another part than asked for")
        length = reply.headers.get("Content-Length")
        total = done + int(length) if length else download.size
        with part.open("ab" if done else "wb") as file, _Progress(download.file, total) as progress:
            while piece := reply.read(_PIECE):
                file.write(piece)
                done += len(piece)
                progress.show(done)
    return total


def _wrong(download: Download, path: Path) -> str | None:
    """What is not right about a downloaded file."""
    if download.size is not None and _size(path) != download.size:
        return f"{_size(path):,} bytes instead of {download.size:,}"
    if download.sha256 is not None and sha256(path) != download.sha256:
        return "its SHA-256 is not the known one"
    if download.content is not None:
        try:
            text = gzip.decompress(path.read_bytes())
        except (OSError, EOFError) as error:
            return f"damaged ({error})"
        if hashlib.sha256(text.rstrip(b"\n") + b"\n").hexdigest() != download.content:
            return "the SHA-256 of its text is not the known one"
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server says {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"not reachable ({error.reason})"
    return f"it broke off ({error or type(error).__name__})"


class _Progress:
    """A line on the terminal, if there is one, that says how far a download is."""

    def __init__(self, name: str, total: int | None) -> None:
        self._name, self._total = name, total
        self._terminal = sys.stderr.isatty()
        self._shown = 0.0

    def __enter__(self) -> _Progress:
        return self

    def show(self, done: int) -> None:
        now = time.monotonic()
        if not self._terminal or (now - self._shown < 0.1 and done != self._total):
            return
        self._shown = now
        line = f"{self._name}  {done / 1e6:,.1f} MB"
        if self._total:
            filled = 30 * done // self._total
            line += f" of {self._total / 1e6:,.1f}  {'━' * filled}{'╌' * (30 - filled)} {100 * done // self._total:3} %"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(file=sys.stderr)
