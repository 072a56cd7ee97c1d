"""`Loopback`: hosts without an emulated network, and `emulate`, which falls back to it."""

import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from .hosts import Hosts
from .link_shape import LinkShape
from .network import Network, unavailable_reason


class Loopback(Hosts):
    """Hosts that are all this machine, joined by its loopback interface at full speed.

    >>> with Loopback(2) as hosts:
    ...     hosts.run(1, ["true"]).wait()
    0
    """

    interface = "lo" if sys.platform == "linux" else "lo0"
    requested_link = "not shaped"

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def free_port(self) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return int(free.getsockname()[1])

    def cut(self, host: int) -> None:
        raise OSError(f"host {host}: the loopback has no link to cut; use an emulated network")

    restore = cut

    def _popen(self, host: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(command, **settings)


def emulate(link: str | LinkShape | None, hosts: int) -> Hosts:
    """Create hosts on a `Network` with such links; on the `Loopback` if `link` is None.

    Where networks cannot be emulated, warns and returns a `Loopback`.

    >>> emulate("100megabit", hosts=2)
    Traceback (most recent call last):
    ValueError: invalid network '100megabit': write it as 100mbit, 1gbit or 1gbit,delay=5ms
    """
    if link is None:
        return Loopback(hosts)
    network = Network(hosts, link)
    reason = unavailable_reason()
    if reason is None:
        return network
    warnings.warn(f"network {link}: {reason}. Using the unshaped loopback instead", stacklevel=2)
    return Loopback(hosts)
