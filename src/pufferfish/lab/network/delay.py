"""The switch of a network whose links take time: every frame leaves it later. A script that needs nothing but Python.

It stands where the bridge is otherwise, so that the kernel shapes the links before and after it as ever, and takes
frames whole, up to 64 KB, as network cards that cut them in pieces get them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

_EVERY_PROTOCOL = 3  # ETH_P_ALL
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_HEADER = 10  # bytes before a frame that say how it is to be cut
_BUFFER = 8 << 20


def main(hosts: int, seconds: float) -> None:
    """Pass frames between the ports until the standard input closes."""
    with contextlib.suppress(OSError):  # root's alone
        os.nice(-15)  # a switch that waits for a busy CPU loses packets
    ports = [_open(f"port{host}") for host in range(hosts)]
    print("ready", flush=True)
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([sys.stdin, *ports], [], [], pause)[0]
        if sys.stdin in ready:  # nobody writes there: the owner has ended
            return
        for host, port in enumerate(ports):
            with contextlib.suppress(OSError):  # all read, or the link was cut
                while port in ready:
                    frame = port.recv(1 << 17)
                    waiting.append((time.monotonic() + seconds, host, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            for port in _targets(ports, source, frame):
                with contextlib.suppress(OSError):  # the queue is full, or the link was cut: lost
                    port.send(frame)


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for force, ask in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            port.setsockopt(socket.SOL_SOCKET, force, _BUFFER)
        except PermissionError:  # in a user namespace: as much as everybody gets
            port.setsockopt(socket.SOL_SOCKET, ask, _BUFFER)
    port.bind((name, _EVERY_PROTOCOL))
    port.setblocking(False)
    return port


def _targets(ports: list[socket.socket], source: int, frame: bytes) -> list[socket.socket]:
    """The last byte of an address is the host's number from 1; all others get what is for everybody."""
    address = frame[_HEADER : _HEADER + 6]
    if address[0] & 1:
        return [port for host, port in enumerate(ports) if host != source]
    return ports[address[5] - 1 : address[5]]


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
