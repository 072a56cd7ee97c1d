"""`fetch`: download a data set. Resumes interrupted downloads, verifies checksums, and never leaves a partial file under its final name."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from ...planning.json_file import sha256, sync
from ...planning.text import progress
from .dataset import Dataset, Download

TIMEOUT = 60.0  # seconds without data
_CHUNK = 1 << 16


def fetch(dataset: Dataset, folder: Path) -> Path:
    """Download the files of `dataset` into `folder`/`dataset.name`, and return that folder. Existing files are kept."""
    target = folder / dataset.name
    target.mkdir(parents=True, exist_ok=True)
    for download in dataset.downloads:
        if not (target / download.file).is_file():
            _download(download, target / download.file)
    return target


def _download(download: Download, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    if part.is_symlink():
        raise ValueError(f"{part}: it is a link, and downloads are not written through links; remove it")
    while True:
        before, reason = _size(part), "the connection was closed early"
        try:
            total = _receive(download, part)
            if total is None or _size(part) >= total:
                break
        except (OSError, http.client.HTTPException) as error:
            reason = _describe(error)
        if _size(part) > before:
            continue  # retry as long as there is progress
        partial = (
            f"{_size(part):,} bytes are kept, run the command again to resume, or " if _size(part) else ""
        )
        raise OSError(
            f"{download.url}: {reason}; {partial}put {download.file} into {path.parent} yourself"
        ) from None
    problem = _mismatch(download, part)
    if problem:
        part.unlink()
        raise ValueError(f"{download.url}: {problem}; the downloaded file was removed")
    sync(part)
    part.rename(path)


def _receive(download: Download, part: Path) -> int | None:
    """Append the server's reply to `part`; return the size of the complete file, if known.

    Of a file that is longer than declared, one byte more is received, which `_mismatch` sees.
    """
    limit = sys.maxsize if download.size is None else download.size + 1
    done = _size(part)
    headers = {"User-Agent": "pufferfish", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        reply = urllib.request.urlopen(urllib.request.Request(download.url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return done  # nothing is left to download; the checksum shows whether the file is right
        raise
    with reply:
        if reply.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0  # the server does not support ranges and sends the whole file
        elif not reply.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            raise OSError("the server sent a different byte range than requested")
        length = reply.headers.get("Content-Length")
        total = done + int(length) if length else download.size
        size = f" ({total / 1e6:,.1f} MB)" if total else ""
        with (
            open(part, "ab" if done else "wb", opener=_open) as file,
            progress(download.file + size, total) as advance,
        ):
            advance(done)
            while chunk := reply.read(min(_CHUNK, max(limit - done, 0))):
                file.write(chunk)
                done += len(chunk)
                advance(len(chunk))
    return None if total is None else min(total, limit)


def _open(path: str, flags: int) -> int:
    """Open a file, but not through a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _mismatch(download: Download, path: Path) -> str | None:
    """Describe how a downloaded file differs from the expected one; None if it does not."""
    if download.size is not None and _size(path) > download.size:
        return f"the server sent more than the expected {download.size:,} bytes"
    if download.size is not None and _size(path) != download.size:
        return f"got {_size(path):,} bytes, expected {download.size:,}"
    if download.sha256 is not None and sha256(path) != download.sha256:
        return "the SHA-256 of the file does not match"
    if download.content_sha256 is not None:
        try:
            text = gzip.decompress(path.read_bytes())
        except (OSError, EOFError) as error:
            return f"damaged gzip file ({error})"
        if hashlib.sha256(text.rstrip(b"\n") + b"\n").hexdigest() != download.content_sha256:
            return "the SHA-256 of its content does not match"
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _describe(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server returned {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"not reachable ({error.reason})"
    return f"the connection failed ({error or type(error).__name__})"
