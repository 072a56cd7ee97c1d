"""Marks on the processes of a network, and `clean`: ending those whose owner is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

#: Its value, "owner/network/host", is in the environment of every process of a network.
MARK = "PUFFERFISH_NETWORK"
_PROC = Path("/proc")


def clean() -> int:
    """End what networks left whose owner was killed; returns how many processes that were.

    The namespaces and links of a `Network` end with its processes. Networks whose owner runs are not touched.

    >>> clean()
    0
    """
    ended: set[int] = set()
    while left := {pid for pid, mark in marked().items() if _orphaned(mark)} - {os.getpid()}:
        kill(left)
        ended |= left
    return len(ended)


def kill(pids: Iterable[int], seconds: float = 10.0) -> None:
    """End processes at once, and wait until they are gone."""
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + seconds
    while pids := [pid for pid in pids if started(pid)]:
        if time.monotonic() > end:
            raise OSError(f"processes {', '.join(map(str, pids))} do not end; look what the system waits for")
        time.sleep(0.005)


def owner() -> str:
    """This process, told apart from those that had or will have its number, here and in containers."""
    namespace = _PROC / "self/ns/pid"
    where = namespace.stat().st_ino if namespace.exists() else 0
    return f"{where}:{os.getpid()}:{started(os.getpid())}"


def marked() -> dict[int, str]:
    """All processes that have a mark and that we may look at."""
    found: dict[int, str] = {}
    blank = list(_PROC.glob("[0-9]*"))
    for pause in (0.0, 0.005):  # while a process changes its program it shows no environment
        time.sleep(pause)
        blank = [folder for folder in blank if not _looked(folder, found)]
    return found


def _looked(folder: Path, found: dict[int, str]) -> bool:
    try:
        entries = (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is not ours
        return True
    for entry in entries:
        if entry.startswith(f"{MARK}=".encode()):
            found[int(folder.name)] = entry.decode(errors="replace").partition("=")[2]
    return len(entries) > 1


def started(pid: int) -> str:
    """When a process started, in the system's ticks; empty when it has ended."""
    try:
        state, *rest = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def _orphaned(mark: str) -> bool:
    try:
        where, pid, start = mark.split("/")[0].split(":")
        return where == owner().split(":")[0] and started(int(pid)) != start
    except ValueError:  # not of our making
        return False
