"""`kill_orphans`: kill processes on emulated hosts whose owner process is gone. Processes are tagged in their environment."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

#: Environment variable of every process on a host. Its value is the tag, "owner/network/host".
TAG_VARIABLE = "PUFFERFISH_NETWORK"
_PROC = Path("/proc")


def kill_orphans() -> int:
    """Kill processes on hosts whose owner was killed; return their number.

    The namespaces and links of a `Network` disappear with its processes. Networks whose owner is alive are not touched.

    >>> kill_orphans()
    0
    """
    killed: set[int] = set()
    while orphans := {pid for pid, tag in tagged_processes().items() if _is_orphaned(tag)} - {os.getpid()}:
        kill_and_wait(orphans)
        killed |= orphans
    return len(killed)


def kill_and_wait(pids: Iterable[int], timeout: float = 10.0) -> None:
    """Send SIGKILL to processes and wait until they are gone; raise OSError after `timeout` seconds."""
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout
    while pids := [pid for pid in pids if start_time(pid)]:
        if time.monotonic() > deadline:
            raise OSError(
                f"processes {', '.join(map(str, pids))} are still alive {timeout:g} s after SIGKILL; "
                "they are probably blocked in a system call"
            )
        time.sleep(0.005)


def owner_id() -> str:
    """Unique id of this process: PID namespace, PID and start time, because PIDs are reused and repeat in containers."""
    namespace = _PROC / "self/ns/pid"
    inode = namespace.stat().st_ino if namespace.exists() else 0
    return f"{inode}:{os.getpid()}:{start_time(os.getpid())}"


def tagged_processes() -> dict[int, str]:
    """Tags by PID of all tagged processes whose environment this process may read."""
    tags: dict[int, str] = {}
    pending = list(_PROC.glob("[0-9]*"))
    for pause in (0.0, 0.005):  # during exec a process has an empty environment
        time.sleep(pause)
        pending = [folder for folder in pending if not _read_tag(folder, tags)]
    return tags


def _read_tag(folder: Path, tags: dict[int, str]) -> bool:
    """Add the process's tag to `tags`; False if its environment is empty and should be read again."""
    try:
        entries = (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended or belongs to another user
        return True
    for entry in entries:
        if entry.startswith(f"{TAG_VARIABLE}=".encode()):
            tags[int(folder.name)] = entry.decode(errors="replace").partition("=")[2]
    return len(entries) > 1


def start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if it has ended."""
    try:
        state, *rest = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def _is_orphaned(tag: str) -> bool:
    try:
        namespace, pid, start = tag.split("/")[0].split(":")
        return namespace == owner_id().split(":")[0] and start_time(int(pid)) != start
    except ValueError:  # not a tag of this package
        return False
