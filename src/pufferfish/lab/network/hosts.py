"""`Hosts`: base class of emulated networks and of the plain loopback."""

import contextlib
import itertools
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, TypeVar

from .launch import launch as launch_job
from .measured_link import measure_link
from .orphans import TAG_VARIABLE, kill_and_wait, kill_orphans, owner_id, tagged_processes

Self = TypeVar("Self", bound="Hosts")
_serial = itertools.count()


class Hosts(ABC):
    """Hosts 0 … n-1 that reach each other over TCP. A context manager: on exit all processes on the hosts are killed."""

    interface: str  #: network interface that has the host's address
    requested_link: str  #: link between hosts as requested, e.g. "1gbit,delay=5ms"

    def __init__(self, hosts: int) -> None:
        if not 1 <= hosts <= 64:
            raise ValueError(f"hosts must be between 1 and 64, got {hosts}")
        self.hosts = hosts
        self._tag = f"{owner_id()}/{next(_serial)}"
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self: Self) -> Self:
        kill_orphans()  # processes of killed runs would compete for the CPU
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def address(self, host: int) -> str:
        """IP address at which the other hosts reach `host`."""

    @abstractmethod
    def free_port(self) -> int:
        """TCP port that is free on host 0."""

    @abstractmethod
    def cut(self, host: int) -> None:
        """Disconnect a host: packets are lost, connections stay open and wait."""

    @abstractmethod
    def restore(self, host: int) -> None:
        """Reconnect a host."""

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
            env={**os.environ, **(env or {}), TAG_VARIABLE: f"{self._tag}/{host}"},
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
        return {pid for pid, tag in tagged_processes().items() if tag.startswith(f"{self._tag}/")}

    def stop(self, grace: float = 0.0) -> None:
        """End all processes on the hosts: SIGTERM to those that `run` started, after `grace` seconds SIGKILL to all."""
        for process in self._started:
            process.terminate()
        deadline = time.monotonic() + grace
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        while pids := self.process_ids():  # workers may outlive their agent, and may fork meanwhile
            kill_and_wait(pids)
        self._reap()

    def close(self) -> None:
        """End all processes and release all resources."""
        self.stop()

    def _check(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host {host} does not exist; hosts are 0 to {self.hosts - 1}")

    @abstractmethod
    def _popen(self, host: int, command: Sequence[str], **settings: object) -> subprocess.Popen[str]:
        """`subprocess.Popen` on a host."""

    def _reap(self) -> None:
        for process in self._started:
            process.wait()
        self._started = []
