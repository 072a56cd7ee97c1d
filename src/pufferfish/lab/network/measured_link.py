"""`MeasuredLink`: goodput and latency between hosts. Also the script that hosts run, which needs only Python."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hosts import Hosts

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


def measure_link(hosts: Hosts) -> MeasuredLink:
    """Measure the link: goodput of the slowest host while all send to their neighbor, and latency."""
    n = hosts.hosts
    if n < 2:
        raise ValueError("a single host has no link to measure; use two or more hosts")
    (latency,) = _measure_pairs(hosts, "ping", [(0, 1)])
    ramp = 0.4 + 0.06 * latency  # seconds until TCP reaches its full rate: thirty round trips
    rates = _measure_pairs(hosts, f"{ramp}", [(i, (i + 1) % n) for i in range(n)])
    return MeasuredLink(hosts.requested_link, min(rates), latency)


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
