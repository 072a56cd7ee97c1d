"""`FolderOwner`: a checkpoint folder belongs to one job at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import warnings
import weakref
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from ..planning.json_file import errors_name

#: The file that is locked. Its text names the process that took the folder last.
OWNER = ".owner"


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
