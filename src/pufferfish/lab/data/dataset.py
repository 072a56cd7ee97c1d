"""Data that lies in a folder, in the official files: found, or one message that says what to put where."""

from __future__ import annotations

import gzip
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "PUFFERFISH_DATA"
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file of a dataset at its home.

    Args:
        url: where it is.
        file: its name here.
        size: its bytes, if known.
        sha256: of the file; or `content`: of what a gzip file holds, without empty lines at its end.
    """

    url: str
    file: str
    size: int | None = None
    sha256: str | None = None
    content: str | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset's files and their home.

    Args:
        name: of the task, and of the folder that `fetch` fills.
        files: what it consists of, each with the names it may have; those that end in .gz are unpacked.
        archives: names of archives that hold all of them.
        downloads: what `fetch` gets.
        folders: more folders inside the data folder in which it may lie.
    """

    name: str
    files: Mapping[str, tuple[str, ...]]
    archives: tuple[str, ...]
    downloads: tuple[Download, ...]
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """A file's bytes, and what to call it in an error."""

    where: str
    data: bytes

    def text(self) -> str:
        """The bytes as text."""
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where}: not UTF-8 text, byte {error.start:,} is wrong") from None


def data_folder(folder: Path | None, name: str, what: str) -> Path:
    """`folder`, or else the one that the environment names."""
    if folder is None:
        named = os.environ.get(VARIABLE)
        if not named:
            raise ValueError(f"{name} needs data: give --data or set {VARIABLE} to {what}")
        folder = Path(named)
    if not folder.exists():
        raise ValueError(f"{name}: there is no {folder}; give --data or set {VARIABLE} to {what}")
    return folder


def read(dataset: Dataset, folder: Path | None) -> dict[str, Found]:
    """All files of `dataset`, from the folder itself or one inside it, as they are or in an archive."""
    get = f"`pufferfish fetch {dataset.name} --data FOLDER`"
    root = data_folder(folder, dataset.name, f"a folder with {_wanted(dataset)}, or let {get} fill one")
    if root.is_file():  # the archive itself
        return _complete(dataset, _archived(dataset, root), root)
    places = [root, *(root / name for name in (dataset.name, *dataset.folders))]
    partial: Path | None = None
    for place in filter(Path.is_dir, places):
        paths = {name: next(_existing(place, names), None) for name, names in dataset.files.items()}
        if all(paths.values()):
            return {name: _file(path) for name, path in paths.items() if path}
        partial = partial or (place if any(paths.values()) else None)
        for archive in _existing(place, dataset.archives):
            return _complete(dataset, _archived(dataset, archive), archive)
    if partial is not None:
        return _complete(
            dataset,
            {n: _file(p) for n, names in dataset.files.items() for p in _existing(partial, names)},
            partial,
        )
    raise ValueError(
        f"{dataset.name}: no data in {root}; put {_wanted(dataset)} there, or run "
        f"`pufferfish fetch {dataset.name} --data {root}`"
    )


def _wanted(dataset: Dataset) -> str:
    names = list(dataset.files)
    either = f" or {dataset.archives[0]}" if dataset.archives else ""
    return f"{', '.join(names[:-1])} and {names[-1]}{either}"


def _existing(place: Path, names: tuple[str, ...]) -> Iterator[Path]:
    return (place / name for name in names if (place / name).is_file())


def _complete(dataset: Dataset, found: dict[str, Found], where: Path) -> dict[str, Found]:
    missing = [name for name in dataset.files if name not in found]
    if missing:
        raise ValueError(f"{dataset.name}: {where} lacks {', '.join(missing)}")
    return found


def _file(path: Path) -> Found:
    data = path.read_bytes()  # what keeps us from reading it, the system says well
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except _BROKEN as error:
            raise ValueError(f"{path}: damaged ({_line(error)}); get it again") from None
    return Found(str(path), data)


def _archived(dataset: Dataset, path: Path) -> dict[str, Found]:
    """The files in an archive; nothing is written to disk."""
    known = {name: canonical for canonical, names in dataset.files.items() for name in names}
    found = {}
    with path.open("rb"):  # what keeps us from reading it, the system says well
        pass
    try:
        for member, data in _members(path, set(known)):
            found[known[member]] = Found(f"{path}:{member}", data)
    except _BROKEN as error:
        raise ValueError(f"{path}: damaged, or no archive ({_line(error)}); get it again") from None
    return found


def _members(path: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if Path(name).name in wanted:
                    yield Path(name).name, archive.read(name)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            name = Path(member.name).name
            file = tar.extractfile(member) if name in wanted and member.isfile() else None
            if file is not None:
                yield name, file.read()


def _line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error) or type(error).__name__).splitlines()[0]
