"""`Dataset`: the official files of a data set, and how to read them from a data folder."""

import gzip
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
