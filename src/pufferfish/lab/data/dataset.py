"""Data folders: finding the files of a data set, verifying and downloading them."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import lzma
import os
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...planning.json_file import sha256, sync
from ...planning.text import progress

T = TypeVar("T")
DATA_VARIABLE = "PUFFERFISH_DATA"
#: Errors that damaged files and archives raise.
_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file to download, with its expected size in bytes and checksums, where known."""

    url: str
    file: str  # name of the local file
    size: int | None = None
    sha256: str | None = None
    content_sha256: str | None = None  # of the content of a gzip file, without empty lines at its end


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Files of a data set and where to download them."""

    name: str  # name of the task, and of the folder that `fetch` fills
    files: Mapping[str, tuple[str, ...]]  # by canonical name: names on disk; those in .gz are decompressed
    archives: tuple[str, ...]  # names of archives that contain all files
    downloads: tuple[Download, ...]  # files that `fetch` downloads
    folders: tuple[str, ...] = ()  # further folders inside the data folder to search


@dataclass(frozen=True)
class DataFile:
    """Content of a file."""

    path: str  # for error messages; "archive:member" for a file in an archive
    data: bytes

    def text(self) -> str:
        """Decode the bytes as UTF-8."""
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: not UTF-8 text (invalid byte {error.start:,})") from None


def data_folder(folder: Path | None, task: str, content: str) -> Path:
    """Return `folder`, or else the one in $PUFFERFISH_DATA; errors name the task and the expected content."""
    if folder is None:
        default = os.environ.get(DATA_VARIABLE)
        if not default:
            raise ValueError(f"{task} needs data: set --data or {DATA_VARIABLE} to {content}")
        folder = Path(default)
    if not folder.exists():
        raise ValueError(f"{task}: {folder} does not exist; set --data or {DATA_VARIABLE} to {content}")
    return folder


def read_files(dataset: Dataset, folder: Path | None) -> dict[str, DataFile]:
    """Read all files of `dataset` from the folder or a known subfolder, either plain or from an archive."""
    fetch = f"`pufferfish fetch {dataset.name} --data FOLDER`"
    root = data_folder(folder, dataset.name, f"a folder with {_file_names(dataset)}, or run {fetch}")
    if root.is_file():
        names, *others = dataset.files.values()
        if root.name in names and not others:  # the only file
            return {name: _read_file(root) for name in dataset.files}
        return _check_complete(dataset, _read_archive(dataset, root), root)
    partial: tuple[dict[str, Path], Path] | None = None
    for candidate in filter(Path.is_dir, (root, *(root / name for name in (dataset.name, *dataset.folders)))):
        paths = {n: path for n, names in dataset.files.items() if (path := _find_file(candidate, names))}
        if len(paths) == len(dataset.files):
            return {name: _read_file(path) for name, path in paths.items()}
        if archive := _find_file(candidate, dataset.archives):
            return _check_complete(dataset, _read_archive(dataset, archive), archive)
        partial = partial or ((paths, candidate) if paths else None)
    if partial is not None:
        _check_complete(dataset, *partial)
    raise ValueError(
        f"{dataset.name}: no data in {root}; put {_file_names(dataset)} there, or run "
        f"`pufferfish fetch {dataset.name} --data {root}`"
    )


def _file_names(dataset: Dataset) -> str:
    *names, last = dataset.files
    archive = f" or {dataset.archives[0]}" if dataset.archives else ""
    return f"{', '.join(names)} and {last}{archive}" if names else f"{last}{archive}"


def _find_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _check_complete(dataset: Dataset, files: dict[str, T], source: Path) -> dict[str, T]:
    missing = [name for name in dataset.files if name not in files]
    if missing:
        raise ValueError(f"{dataset.name}: {', '.join(missing)} missing in {source}")
    return files


def _read_file(path: Path) -> DataFile:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except _ERRORS as error:
            raise ValueError(f"{path}: damaged ({_first_line(error)}); download it again") from None
    return DataFile(str(path), data)


def _read_archive(dataset: Dataset, path: Path) -> dict[str, DataFile]:
    """Read the files of `dataset` from an archive, without writing to disk."""
    canonical = {alias: name for name, aliases in dataset.files.items() for alias in aliases}
    files = {}
    with path.open("rb"):  # let errors of the file system pass: only decoding errors are translated below
        pass
    try:
        for member, data in _read_members(path, set(canonical)):
            files[canonical[member]] = DataFile(f"{path}:{member}", data)
    except _ERRORS as error:
        problem = f"damaged or not an archive ({_first_line(error)}); download it again"
        raise ValueError(f"{path}: {problem}") from None
    return files


def _read_members(path: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if Path(name).name in names:
                    yield Path(name).name, archive.read(name)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            name = Path(member.name).name
            file = tar.extractfile(member) if name in names and member.isfile() else None
            if file is not None:
                yield name, file.read()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


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
