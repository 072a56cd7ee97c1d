"""`Link`: what a network gives. Also the script that hosts run to find out, which needs nothing but Python."""

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
_WINDOW = 0.8  # seconds that count
_PATIENCE = 20.0


@dataclass(frozen=True)
class Link:
    """The link between hosts: what was asked for, and what was measured.

    >>> print(Link("1gbit", got_mbit=941.2, latency_ms=0.05))
    asked 1gbit, got 941.2 Mbit/s, 0.05 ms
    """

    asked: str
    got_mbit: float  #: payload, the slowest host's while all send to the next
    latency_ms: float  #: of one byte, one way, on the idle link

    def __str__(self) -> str:
        return f"asked {self.asked}, got {self.got_mbit:.1f} Mbit/s, {self.latency_ms:.2f} ms"


def measure(hosts: Hosts) -> Link:
    """See `Hosts.measure`."""
    n = hosts.hosts
    if n < 2:
        raise ValueError("one host has no link to measure; make two or more")
    (latency,) = _pairs(hosts, "ping", [(0, 1)])
    rise = 0.4 + 0.06 * latency  # seconds until TCP is at speed: thirty rounds
    rates = _pairs(hosts, f"{rise}", [(i, (i + 1) % n) for i in range(n)])
    return Link(hosts.asked, min(rates), latency)


def _pairs(hosts: Hosts, what: str, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """What each pair (from, to) measures, all at the same time: a "ping", or a stream, named by its first seconds."""
    script = [sys.executable, "-I", "-S", __file__, what]
    started: list[subprocess.Popen[str]] = []
    try:
        servers = [hosts.run(to, script, stdout=subprocess.PIPE) for _, to in pairs]
        started += servers
        ports = [_line(server) for server in servers]
        for (source, to), port in zip(pairs, ports, strict=True):
            client = [*script, hosts.address(to), port]
            started.append(hosts.run(source, client, stdout=subprocess.DEVNULL))
        return [float(_line(server)) for server in servers]
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def _line(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise OSError("the link could not be measured: a host's probe ended; is a link cut?")
    return line


def _serve(what: str) -> None:
    """Print the port, wait for one client, print what was measured: milliseconds one way, or Mbit/s."""
    with socket.create_server(("", 0)) as server:
        server.settimeout(_PATIENCE)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_PATIENCE)
        print(_pinged(connection) if what == "ping" else _streamed(connection, float(what)), flush=True)


def _pinged(connection: socket.socket) -> float:
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        connection.sendall(b"x")
        if not connection.recv(1):
            raise ConnectionError
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2 * 1e3


def _streamed(connection: socket.socket, rise: float) -> float:
    """Mbit/s after the first seconds, counted where they arrive: a sender's buffer says nothing about the line."""
    buffer = bytearray(1 << 20)
    begin = time.perf_counter()
    start = received = 0.0
    while True:
        size = connection.recv_into(buffer)
        now = time.perf_counter()
        if start:
            received += size
        elif now > begin + rise:
            start = now
        if not size or (start and now > start + _WINDOW):
            return received * 8e-6 / (now - start)


def _connect(what: str, address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=_PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if what == "ping":
            while byte := connection.recv(1):
                connection.sendall(byte)
        else:
            data = bytes(1 << 18)
            while True:
                connection.sendall(data)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the other side has seen enough, or cannot be reached
        if sys.argv[2:]:
            _connect(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        else:
            _serve(sys.argv[1])
