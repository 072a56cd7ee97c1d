"""`Loopback`: the same hosts without a network, for systems where none can be emulated; and `emulate`, which chooses."""

from __future__ import annotations

import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from .hosts import Hosts
from .link_shape import Shape
from .namespaces import Network, why_not


class Loopback(Hosts):
    """Hosts that are all this machine, joined by its loopback: nothing is slowed down.

    >>> with Loopback(2) as hosts:
    ...     hosts.run(1, ["true"]).wait()
    0
    """

    interface = "lo" if sys.platform == "linux" else "lo0"
    asked = "not shaped"

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def port(self) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return int(free.getsockname()[1])

    def cut(self, host: int) -> None:
        raise OSError(f"host {host}: the loopback has no link to cut; an emulated network has")

    restore = cut

    def _start(self, host: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(command, **settings)


def emulate(link: str | Shape | None, hosts: int) -> Hosts:
    """A `Network` with such links; the `Loopback` for None, and with a warning where none can be emulated.

    >>> emulate("100megabit", hosts=2)
    Traceback (most recent call last):
    ValueError: network '100megabit': write it as 100mbit, 1gbit or 1gbit,delay=5ms
    """
    if link is None:
        return Loopback(hosts)
    network = Network(hosts, link)
    reason = why_not()
    if reason is None:
        return network
    warnings.warn(f"network {link}: {reason}. The plain loopback takes its place, not shaped", stacklevel=2)
    return Loopback(hosts)
