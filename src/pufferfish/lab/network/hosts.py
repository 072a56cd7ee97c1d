"""`Hosts`: what an emulated network and the plain loopback have in common."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, TypeVar

from .clean import MARK, clean, kill, marked, owner
from .launch import launch
from .link_speed import Link, measure

Self = TypeVar("Self", bound="Hosts")
_serial = itertools.count()


class Hosts(ABC):
    """Hosts 0 … n-1 that reach each other over TCP. A context manager: at its end all that runs on them ends."""

    interface: str  #: that has a host's address
    asked: str  #: the link that was asked for

    def __init__(self, hosts: int) -> None:
        if not 1 <= hosts <= 64:
            raise ValueError(f"{hosts} hosts: choose 1 to 64")
        self.hosts = hosts
        self._mark = f"{owner()}/{next(_serial)}"
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self: Self) -> Self:
        clean()  # what killed ones left would compete for the machine
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def address(self, host: int) -> str:
        """Where the others reach a host."""

    @abstractmethod
    def port(self) -> int:
        """A port that is free on host 0."""

    @abstractmethod
    def cut(self, host: int) -> None:
        """Pull a host's cable: packets are lost, connections wait."""

    @abstractmethod
    def restore(self, host: int) -> None:
        """Put it back."""

    def run(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, in this process's folder; `env` is added to the environment.

        It is out of the terminal's reach: ctrl-C is for this process, which ends all when it leaves.
        """
        if not 0 <= host < self.hosts:
            raise ValueError(f"host {host}: there are 0 to {self.hosts - 1}")
        process = self._start(
            host,
            command,
            env={**os.environ, **(env or {}), MARK: f"{self._mark}/{host}"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def launch(
        self,
        command: Sequence[str],
        *,
        per_host: int = 1,
        env: Mapping[str, str] | None = None,
        restarts: int = 0,
        write: Callable[[str], object] = print,
        grace: float = 10.0,
    ) -> int:
        """Run `torchrun command` as one job of all hosts, each with an agent and `per_host` workers of its own.

        When one host fails, or on ctrl-C, all end: the agents are told to stop and have `grace` seconds for it.

        Args:
            command: script and arguments, or "-m", module and arguments.
            env: added to the environment.
            restarts: how often torchrun may start the workers again, on all hosts, when some have failed. Ranks then
                follow the text of the hosts' addresses: from ten hosts on, a rank's host is another.
            write: gets every line of output, with the host before it.

        Returns:
            0, or the exit code of the host that failed first.
        """
        return launch(
            self, command, per_host=per_host, env=env or {}, restarts=restarts, write=write, grace=grace
        )

    def measure(self) -> Link:
        """The link as it is: what each host gets while all send to the next one, and how long a byte takes."""
        return measure(self)

    def running(self) -> set[int]:
        """The processes on all hosts, whoever started them there."""
        return {pid for pid, mark in marked().items() if mark.startswith(f"{self._mark}/")}

    def stop(self, grace: float = 0.0) -> None:
        """End all that runs on the hosts: what `run` started by SIGTERM, and after `grace` seconds all at once."""
        for process in self._started:
            process.terminate()
        end = time.monotonic() + grace
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        while left := self.running():  # workers may outlive their agent, and fork while we look
            kill(left)
        self._forget()

    def close(self) -> None:
        """End everything."""
        self.stop()

    @abstractmethod
    def _start(self, host: int, command: Sequence[str], **settings: object) -> subprocess.Popen[str]:
        """`subprocess.Popen` on a host."""

    def _forget(self) -> None:
        for process in self._started:
            process.wait()
        self._started = []
