"""Ethernet switch with a delay, as a script of the standard library only: every frame leaves it later than it came.

It replaces the bridge, so the kernel still shapes the links on both sides. It receives frames before segmentation
(up to 64 KB), as a network card with segmentation offload does.
"""

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_HEADER = 10  # bytes of the virtio header before a frame, which describes its segmentation
_BUFFER = 8 << 20


def main(hosts: int, delay: float) -> None:
    """Forward frames between the ports, each `delay` seconds late, until standard input closes."""
    with contextlib.suppress(OSError):  # only root may raise its priority
        os.nice(-15)  # a switch that waits for a busy CPU drops packets
    ports = [_open(f"port{host}") for host in range(hosts)]
    print("ready", flush=True)
    queue: deque[tuple[float, int, bytes]] = deque()
    while True:
        pause = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready = select.select([sys.stdin, *ports], [], [], pause)[0]
        if sys.stdin in ready:  # nothing is ever written to it: the owner has ended
            return
        for host, port in enumerate(ports):
            with contextlib.suppress(OSError):  # no more frames, or the link is cut
                while port in ready:
                    frame = port.recv(1 << 17)
                    queue.append((time.monotonic() + delay, host, frame))
        while queue and queue[0][0] <= time.monotonic():
            _, source, frame = queue.popleft()
            for port in _targets(ports, source, frame):
                with contextlib.suppress(OSError):  # send queue full, or link cut: drop the frame
                    port.send(frame)


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for forced, limited in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            port.setsockopt(socket.SOL_SOCKET, forced, _BUFFER)
        except PermissionError:  # in a user namespace the system's limit applies
            port.setsockopt(socket.SOL_SOCKET, limited, _BUFFER)
    port.bind((name, _ETH_P_ALL))
    port.setblocking(False)
    return port


def _targets(ports: list[socket.socket], source: int, frame: bytes) -> list[socket.socket]:
    """Ports to forward a frame to: the last byte of a MAC address is the host number + 1; broadcasts go to all others."""
    address = frame[_HEADER : _HEADER + 6]
    if address[0] & 1:
        return [port for host, port in enumerate(ports) if host != source]
    return ports[address[5] - 1 : address[5]]


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
