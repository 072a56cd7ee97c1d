"""`Hosts`: processes on hosts of this machine, started by torchrun, and the link that they have between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

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

    def launch(
        self,
        command: Sequence[str],
        *,
        per_host: int = 1,
        env: Mapping[str, str] | None = None,
        write: Callable[[str], object] = print,
        grace: float = 10.0,
    ) -> int:
        """Run `torchrun command` as one job on all hosts, with an agent and `per_host` workers on each.

        When a host fails, or on ctrl-C, the job ends: agents get SIGTERM, and after `grace` seconds SIGKILL.

        Args:
            command: script and arguments, or "-m", module and arguments. Modules of the working folder do not replace others.
            per_host: workers on each host.
            env: variables added to the environment.
            write: called with every line of output, prefixed with the host.
            grace: seconds between SIGTERM and SIGKILL.

        Returns:
            0, or the exit code of the host that failed first.
        """
        if not command:
            raise ValueError("launch: the command is empty; pass a script, or '-m' and a module")
        if not 1 <= per_host <= 64:
            raise ValueError(f"workers per host must be between 1 and 64, got {per_host}")
        if command[0] == "-m":
            command = ["--no-python", sys.executable, "-c", _RUN_MODULE, *command[1:]]
        port = self.free_port()
        threads = max(1, (os.cpu_count() or 1) // (self.hosts * per_host))
        variables = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "PYTHONUNBUFFERED": "1",
            # Hides the warnings of agents that outlive the one with the store.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            **(env or {}),
        }
        agents: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        write_errors: list[Exception] = []
        try:
            for host in range(self.hosts):
                agent_command = [
                    sys.executable, "-c", _RUN_MODULE, "torch.distributed.run",
                    f"--nnodes={self.hosts}", f"--nproc-per-node={per_host}",
                    # Without it an agent resolves its host name, which gives 127.0.0.1.
                    f"--local-addr={self.address(host)}",
                    f"--node-rank={host}", f"--master-addr={self.address(0)}", f"--master-port={port}", *command,
                ]  # fmt: skip
                agent = self.run(
                    host, agent_command, variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                agents.append(agent)
                readers.append(
                    threading.Thread(
                        target=_forward_output, args=(host, agent, write, write_errors), daemon=True
                    )
                )
                readers[-1].start()
            while True:
                codes = [agent.poll() for agent in agents]
                failed = [code for code in codes if code]
                if failed or write_errors or None not in codes:
                    break
                time.sleep(0.02)
        finally:
            self.stop(grace)
            for reader in readers:
                reader.join()
        if write_errors:
            raise write_errors[0]
        if not failed:
            return 0
        return failed[0] if failed[0] > 0 else 128 - failed[0]  # a shell's code for death by a signal

    def measure(self) -> MeasuredLink:
        """Measure the link: goodput of the slowest host while all send to their neighbor, and latency."""
        n = self.hosts
        if n < 2:
            raise ValueError("a single host has no link to measure; use two or more hosts")
        (latency,) = _measure_pairs(self, "ping", [(0, 1)])
        ramp = 0.4 + 0.06 * latency  # seconds until TCP reaches its full rate: thirty round trips
        rates = _measure_pairs(self, f"{ramp}", [(i, (i + 1) % n) for i in range(n)])
        return MeasuredLink(self.requested_link, min(rates), latency)

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


#: Runs a module like `python -m`, with the working folder last in `sys.path`: it may hold a `torch.py`, for example.
#: On Linux, the process gets SIGTERM when its parent ends in any way (PR_SET_PDEATHSIG is 1): nothing outlives a kill.
_RUN_MODULE = (
    "import ctypes, runpy, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15); "
    "sys.path.sort(key=lambda folder: not folder); del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def _forward_output(
    host: int, agent: subprocess.Popen[str], write: Callable[[str], object], errors: list[Exception]
) -> None:
    assert agent.stdout is not None
    with agent.stdout as lines:
        for line in lines:  # read to the end even after an error, or workers block on a full pipe
            try:
                write(f"host{host} | {line.rstrip()}")
            except Exception as error:
                errors.append(error)


_PINGS = 40
_WINDOW = 0.8  # seconds of measurement after TCP has reached its full rate
_TIMEOUT = 20.0


@dataclass(frozen=True)
class MeasuredLink:
    """Requested and measured link between hosts. The fields are the keys of `link` in run.json.

    >>> print(MeasuredLink("1gbit", got_mbit=941.2, latency_ms=0.05))
    requested 1gbit, measured 941.2 Mbit/s, 0.05 ms
    """

    asked: str  # requested link
    got_mbit: float  # goodput in Mbit/s of the slowest host while all send to their neighbor
    latency_ms: float  # one-way latency of one byte on the idle link, in milliseconds

    def __str__(self) -> str:
        return f"requested {self.asked}, measured {self.got_mbit:.1f} Mbit/s, {self.latency_ms:.2f} ms"


def _measure_pairs(hosts: Hosts, mode: str, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Measure all pairs (source, target) at the same time; `mode` is "ping" or the ramp of a stream in seconds."""
    script = [sys.executable, "-I", "-S", __file__, mode]
    started: list[subprocess.Popen[str]] = []
    try:
        servers = [hosts.run(target, script, stdout=subprocess.PIPE) for _, target in pairs]
        started += servers
        ports = [_read_line(server) for server in servers]
        for (source, target), port in zip(pairs, ports, strict=True):
            client = [*script, hosts.address(target), port]
            started.append(hosts.run(source, client, stdout=subprocess.DEVNULL))
        return [float(_read_line(server)) for server in servers]
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def _read_line(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise OSError(
            "the link cannot be measured: the script on a host ended early; check that no link is cut"
        )
    return line


def _serve(mode: str) -> None:
    """Print the port, wait for one client, print the result: one-way milliseconds, or Mbit/s."""
    with socket.create_server(("", 0)) as server:
        server.settimeout(_TIMEOUT)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_TIMEOUT)
        print(_latency(connection) if mode == "ping" else _goodput(connection, float(mode)), flush=True)


def _latency(connection: socket.socket) -> float:
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        connection.sendall(b"x")
        if not connection.recv(1):
            raise ConnectionError
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2 * 1e3


def _goodput(connection: socket.socket, ramp: float) -> float:
    """Mbit/s after the first `ramp` seconds, counted by the receiver because a sender only fills its buffer."""
    buffer = bytearray(1 << 20)
    begin = time.perf_counter()
    start = received = 0.0
    while True:
        size = connection.recv_into(buffer)
        now = time.perf_counter()
        if start:
            received += size
        elif now > begin + ramp:
            start = now
        if not size or (start and now > start + _WINDOW):
            return received * 8e-6 / (now - start)


def _connect(mode: str, address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=_TIMEOUT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if mode == "ping":
            while byte := connection.recv(1):
                connection.sendall(byte)
        else:
            data = bytes(1 << 18)
            while True:
                connection.sendall(data)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the other side has finished, or cannot be reached
        if sys.argv[2:]:
            _connect(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        else:
            _serve(sys.argv[1])
