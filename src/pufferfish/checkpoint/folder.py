"""The folder of a job's checkpoints: who owns it, how a checkpoint becomes visible in it, and which one is intact.

A checkpoint is written into a hidden folder, which is then renamed. A reader sees it completely or not at all, whenever the
writer is killed. Its manifest has the size and SHA-256 of every file, so that damage is detected.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import warnings
import weakref
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from ..planning import errors_name, read_json, write_text
from ..planning.json_file import check_file, sync

#: The file that is locked. Its text names the process that took the folder last.
OWNER = ".owner"
MANIFEST = "manifest.json"
_HIDDEN = ".writing."
_NAME = re.compile(r"(\d+)(-step-\d+)?")  # ordered by the running number, not by the step
_NOT_OURS = "damaged, or not written by pufferfish.Checkpoint"
_VERSION = 1


class FolderOwner:
    """The right of a `Checkpoint` to save into a folder. Worker 0 takes it for its job.

    A lock refuses a second one, of this process or another, while the first one lives. The kernel releases it when the
    process ends, however it ends, so a killed job blocks nobody. Where a file system does not pass locks on to other
    hosts, the second job gets the folder, and `check` stops the first one before its next save.

    If a second `Checkpoint` of the same process resumes, as a restart in the process does, the first one loses the
    folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     owner = FolderOwner.take(Path(folder))
    ...     FolderOwner.take(Path(folder), owner) is owner
    True
    """

    _of_process: ClassVar[weakref.WeakValueDictionary[Path, FolderOwner]] = weakref.WeakValueDictionary()

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / OWNER
        if self._file.is_symlink():
            raise ValueError(
                f"{self._file} is a link, and what it points to would be overwritten; remove the link"
            )
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._release = weakref.finalize(self, os.close, descriptor)  # closing the file releases the lock
        try:
            _lock(self._file, descriptor)
            now = datetime.now().astimezone().isoformat(" ", "seconds")
            self._text = (
                f"process {os.getpid()} on {socket.gethostname()}, since {now} ({secrets.token_hex(8)})"
            )
            with errors_name(self._file):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, self._text.encode(), 0)
                os.fsync(descriptor)  # now, so that other hosts can read it
        except BaseException:
            self._release()
            raise

    @classmethod
    def take(cls, folder: Path, mine: FolderOwner | None = None) -> FolderOwner:
        """Take the folder, which is created if missing; ValueError if another job has it.

        Args:
            mine: the result of the caller's last call.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if mine is not None and mine._file.exists():
            mine.check()
            if mine._release.alive:
                return mine
        folder = folder.resolve()
        owner = cls._of_process[folder] = cls(folder)
        return owner

    @classmethod
    def take_to_resume(cls, folder: Path, mine: FolderOwner | None = None) -> FolderOwner:
        """Take the folder as `take`, also from another `Checkpoint` of this process if the caller has not taken it yet."""
        before = cls._of_process.get(folder.resolve())
        if before is not None and mine is None:
            before._release()  # a restart: a traceback may still hold the Checkpoint of the run before
        return cls.take(folder, mine)

    def check(self) -> None:
        """Raise ValueError if another process has taken the folder since."""
        holder = self._file.read_text(encoding="utf-8", errors="replace")
        if holder != self._text:
            raise ValueError(
                f"{self.folder}: another job or Checkpoint has taken it, {_readable(holder)}; to keep their checkpoints "
                "apart, this one no longer uses it. Give each its own folder"
            )

    @classmethod
    def _release_all(cls) -> None:
        for owner in list(cls._of_process.values()):
            owner._release()


# A forked process, such as a worker of a DataLoader, must not keep the lock when the job has been killed.
os.register_at_fork(after_in_child=FolderOwner._release_all)


def _lock(file: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _readable(file.read_text(encoding="utf-8", errors="replace"))
        raise ValueError(
            f"{file.parent}: in use by another job or another Checkpoint of this one, {holder}; stop or close that one, or "
            "give this one its own folder. To read checkpoints of a running job, copy them to another folder"
        ) from None
    except OSError as error:
        warnings.warn(
            f"{file}: this file system has no locks ({error.strerror}); make sure that no two jobs use the folder",
            stacklevel=2,
        )


def _readable(holder: str) -> str:
    """The text of the file without the random number, which tells processes with the same name apart."""
    return holder.partition(" (")[0] or "which has just started"


def create_hidden_folder(folder: Path) -> Path:
    """Create a hidden folder in `folder` to write a checkpoint into. This process owns `folder` (`FolderOwner`).

    Hidden folders that are there are of dead writers. They are removed first, to free their disk space.
    """
    for path in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(path, ignore_errors=True)
    hidden = folder / f"{_HIDDEN}{secrets.token_hex(8)}"
    hidden.mkdir()  # not mkdtemp: its folders do not follow the umask
    return hidden


def publish_by_rename(
    hidden: Path, files: Mapping[str, Any], world_size: int, step: int | None, keep: int | None
) -> Path:
    """Write the manifest, make the checkpoint visible by renaming `hidden`, and remove old checkpoints.

    Args:
        hidden: a folder from `create_hidden_folder` with all `files` in it.
        files: manifest entry (`file_record`) of every file, by file name.
        step: number of updates, becomes part of the folder name.
        keep: number of checkpoints to keep, including this one; None keeps all.

    Returns:
        The folder of the checkpoint.
    """
    data = {"pufferfish checkpoint": _VERSION, "world": world_size, "files": dict(sorted(files.items()))}
    data["sha256"] = _digest(data)
    manifest = hidden / MANIFEST
    write_text(manifest, json.dumps(data, indent=1) + "\n")
    sync(manifest)
    sync(hidden)
    older = list_checkpoints(hidden.parent)
    number = 1 + _running_number(older[-1]) if older else 1
    published = hidden.with_name(f"{number:06d}" if step is None else f"{number:06d}-step-{step}")
    hidden.rename(published)  # atomic: from here on the checkpoint exists
    sync(published.parent)
    for path in older[: max(len(older) + 1 - keep, 0)] if keep else []:
        renamed = path.with_name(f"{_HIDDEN}{path.name}")
        path.rename(renamed)  # first, so that nobody reads a half-removed checkpoint
        shutil.rmtree(renamed, ignore_errors=True)
    return published


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    if not folder.exists():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (_running_number(path), path))


def _running_number(checkpoint: Path) -> int:
    """Return the running number at the start of a checkpoint's folder name."""
    return int(checkpoint.name.split("-")[0])


def newest_checkpoint(folder: Path, damaged: str) -> tuple[str, str] | None:
    """Return the path of the newest intact checkpoint and the digest of its manifest; None if there is none.

    Args:
        damaged: "raise" for a ValueError if the newest checkpoint is damaged, "previous" to fall back with a
            warning to the one before it.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return str(path), read_manifest(path)["sha256"]
        except ValueError as error:
            if damaged == "raise":
                raise ValueError(f'{error}; pass damaged="previous" to resume from the one before') from None
            warnings.warn(f"{error}; resuming from the one before", stacklevel=2)
    if paths:
        raise ValueError(f"{folder}: all {len(paths)} checkpoints are damaged")
    return None


def read_manifest(path: Path, contents: bool = True) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path` after checking every file against it.

    Args:
        contents: compare the SHA-256 of each file, not only its size.

    Raises:
        ValueError: if the checkpoint is damaged or has another format.
    """
    data = _read_intact(path)
    version = data.get("pufferfish checkpoint")
    if version != _VERSION:
        raise ValueError(
            f"{path / MANIFEST}: its format is {version}, but this version of pufferfish reads format "
            f"{_VERSION}"
        )
    try:
        files = {path / name: record for name, record in data["files"].items()}
        ours = 0 < data["world"] <= len(files) and all(
            file.parent == path and record.keys() == {"bytes", "sha256"} for file, record in files.items()
        )
    except (KeyError, TypeError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"{path / MANIFEST}: {_NOT_OURS}")
    for file, record in files.items():
        check_file(file, record, contents)
    return data


def _read_intact(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`; ValueError if its own digest does not fit."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{path}: damaged, {MANIFEST} is missing")
    try:
        data: dict[str, Any] = read_json(manifest)
        intact = data["sha256"] == _digest({key: x for key, x in data.items() if key != "sha256"})
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ValueError(f"{manifest}: {_NOT_OURS}")
    return data
