"""`Hosts`: hosts that are all this machine, joined by its loopback interface; `Network` emulates links between them."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from .launch import launch as launch_job
from .measured_link import measure_link

Self = TypeVar("Self", bound="Hosts")
#: Environment variable that all processes on hosts inherit; its value identifies the hosts.
TAG_VARIABLE = "PUFFERFISH_HOSTS"


class Hosts:
    """Hosts 0 … n-1 that reach each other over TCP. A context manager: on exit all processes on the hosts are killed.

    >>> with Hosts(2) as hosts:
    ...     hosts.run(1, ["true"]).wait()
    0
    """

    #: Network interface that has the host's address.
    interface = "lo" if sys.platform == "linux" else "lo0"
    #: Link between hosts as requested, e.g. "1gbit,delay=5ms".
    requested_link = "not shaped"

    def __init__(self, hosts: int) -> None:
        if not 1 <= hosts <= 64:
            raise ValueError(f"hosts must be between 1 and 64, got {hosts}")
        self.hosts = hosts
        self._tag = f"{os.getpid()}:{secrets.token_hex(8)}"
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        """IP address at which the other hosts reach `host`."""
        return "127.0.0.1"

    def free_port(self) -> int:
        """TCP port that is free on host 0."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return int(free.getsockname()[1])

    def cut(self, host: int) -> None:
        """Disconnect a host: packets are lost, connections stay open and wait."""
        raise OSError(f"host {host}: the loopback has no link to cut; use an emulated network")

    def restore(self, host: int) -> None:
        """Reconnect a host."""
        self.cut(host)

    def run(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host in the current directory, and return its process without waiting.

        `env` is added to the environment. The process is in a session of its own: ctrl-C interrupts only this
        process, which kills the others on exit.
        """
        self._check(host)
        process = self._popen(
            host,
            command,
            env={**os.environ, **(env or {}), TAG_VARIABLE: self._tag},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._started.append(process)
        return process

    launch = launch_job
    measure = measure_link

    def process_ids(self) -> set[int]:
        """PIDs of all processes on the hosts, including descendants."""
        tag, found = f"{TAG_VARIABLE}={self._tag}".encode(), set()
        for pause in (0.0, 0.005):  # during exec a process has an empty environment
            time.sleep(pause)
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                    if tag in (folder / "environ").read_bytes().split(b"\0"):
                        found.add(int(folder.name))
        return found

    def stop(self, grace: float = 0.0) -> None:
        """End all processes on the hosts: SIGTERM to those that `run` started, after `grace` seconds SIGKILL to all."""
        for process in self._started:
            process.terminate()
        deadline = time.monotonic() + grace
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        while pids := self.process_ids():  # workers may outlive their agent, and may fork meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._reap()

    def close(self) -> None:
        """End all processes and release all resources."""
        self.stop()

    def _check(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host {host} does not exist; hosts are 0 to {self.hosts - 1}")

    def _popen(self, host: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        """`subprocess.Popen` on a host."""
        return subprocess.Popen(command, **settings)

    def _reap(self) -> None:
        for process in self._started:
            process.wait()
        self._started = []
