"""`Network`: hosts as Linux network namespaces on a bridge, every link shaped both ways.

Everything lives in namespaces of its own, processes included, whose first process reads from a pipe that the
owner holds. When the owner ends, however it ends, the pipe closes, the first process ends, and the kernel ends all
others and takes the links down. So nothing has a name outside that could collide or be left over, and root and
a user who may make user namespaces go the same way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import delay
from .clean import MARK
from .hosts import Hosts
from .link_shape import Shape

#: A packet that would wait longer for a link is lost.
_QUEUE_MS = 50
#: The first process. $1 hosts, $2 bit/s, $3 bytes at once, $4 ms in a queue; then the switch that goes
#: on as the first process, if it is not the bridge.
_SETUP = r"""
set -eu
hosts=$1 burst=$3 tbf="tbf rate $2bit burst $3 latency $4ms"
shift 4
mkdir /run/netns 2>/dev/null || true
mount -t tmpfs tmpfs /run/netns 2>/dev/null || { mount -t tmpfs tmpfs /run; mkdir /run/netns; }
cat /etc/hosts > /run/netns/hosts || true
ip link add bridge type bridge
ip link set bridge up
i=0
while [ $i -lt $hosts ]; do
    address=10.0.0.$((i + 1))
    ip netns add host$i
    ip link add port$i type veth peer name eth0 address $(printf 02:00:00:00:00:%02x $((i + 1))) netns host$i
    tc qdisc add dev port$i root $tbf
    tc -n host$i qdisc add dev eth0 root $tbf
    [ $# -gt 0 ] || ip link set port$i master bridge
    ip link set port$i addrgenmode none up
    ip -n host$i link set lo up
    ip -n host$i link set eth0 addrgenmode none gso_max_size $((burst < 65536 ? burst * 7 / 8 : 65536)) up
    ip -n host$i address add $address/24 dev eth0
    # Without a say it would be the system's: bbr is slower here, and cubic takes late packets for a full line.
    ip -n host$i route replace 10.0.0.0/24 dev eth0 src $address congctl reno
    printf '%s host'$i'\n' $address ::ffff:$address >> /run/netns/hosts
    i=$((i + 1))
done
mount --bind /run/netns/hosts /etc/hosts || true # else torch looks names up, and complains
[ $# -eq 0 ] || exec "$@"
echo ready
exec cat >/dev/null 2>&1
"""


class Network(Hosts):
    """Hosts on a network of their own, each behind a link of this speed.

    Needs Linux, iproute2 and util-linux, and root or user namespaces; entering raises OSError that says
    what is missing. Link speeds are of packets; payload gets some 95 % of them.

    Args:
        hosts: how many.
        link: speed each way, and perhaps a delay from host to host: "100mbit", "1gbit,delay=5ms".

    >>> if not why_not():
    ...     with Network(2, "100mbit") as network:
    ...         code = network.run(0, ["true"]).wait()
    """

    interface = "eth0"

    def __init__(self, hosts: int = 4, link: str | Shape = "1gbit") -> None:
        super().__init__(hosts)
        self.shape = link if isinstance(link, Shape) else Shape.parse(link)
        self.shape.check()
        self.asked = str(self.shape)
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        super().__enter__()
        if sys.platform != "linux":
            raise OSError("networks are emulated on Linux only")
        for tool in ("ip", "tc", "unshare", "nsenter"):
            if not shutil.which(tool):
                raise OSError(f"networks need {tool}, which is not installed: see iproute2, util-linux")
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def address(self, host: int) -> str:
        return f"10.0.0.{host + 1}"

    def port(self) -> int:
        return 29500  # nobody else is here

    def cut(self, host: int) -> None:
        self._set_port(host, "down")

    def restore(self, host: int) -> None:
        self._set_port(host, "up")

    def running(self) -> set[int]:
        """The processes on all hosts: all whose network is a host's."""
        found: set[int] = set()
        if self._keeper is None or self._keeper.poll() is not None:
            return found
        hosts = {os.stat(self._path(host)).st_ino for host in range(self.hosts)}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "ns/net").stat().st_ino in hosts:
                    found.add(int(folder.name))
        return found

    def close(self) -> None:
        """End everything: all processes, then the network."""
        if self._keeper is not None:
            self._keeper.communicate()  # closes the pipe, and waits for the last process
            self._keeper = None
        self._forget()

    def _set_up(self) -> None:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        shape = self.shape
        numbers = self.hosts, round(shape.mbit * 1e6), shape.burst, _QUEUE_MS
        switch = [sys.executable, "-I", "-S", delay.__file__, str(self.hosts), str(shape.delay_ms / 1e3)]
        self._keeper = subprocess.Popen(
            ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", _SETUP, "pufferfish-network", *map(str, numbers), *(switch if shape.delay_ms else [])],
            env={**os.environ, MARK: f"{self._mark}/network"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "ready\n":
            _, said = self._keeper.communicate()
            reason = (said.strip() or "the set-up was ended").splitlines()[-1]
            if reason.startswith("unshare:"):
                reason += "; it needs root with all its rights, or user namespaces"
            raise OSError(f"network {self.asked} cannot be emulated: {reason}")

    def _start(self, host: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        process = _Inside(self._enter(self._path(host), command), **settings)
        while process.poll() is None and not process.inner():
            time.sleep(0.001)
        return process

    def _set_port(self, host: int, state: str) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host {host}: there are 0 to {self.hosts - 1}")
        line = self._enter(f"/proc/{self._root()}/ns/net", ["ip", "link", "set", f"port{host}", state])
        subprocess.run(line, check=True, stdin=subprocess.DEVNULL)

    def _enter(self, network: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in there, in that network and in this process's folder."""
        root = self._root()
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return [
            "nsenter", f"--target={root}", *user, "--mount", f"--net={network}",
            f"--pid=/proc/{root}/ns/pid_for_children", "--", "env", f"--chdir={os.getcwd()}", *command,
        ]  # fmt: skip

    def _path(self, host: int) -> str:
        return f"/proc/{self._root()}/root/run/netns/host{host}"

    def _root(self) -> int:
        if self._keeper is None or self._keeper.poll() is not None:
            raise OSError(f"network {self.asked}: it is not there; use it in a with block")
        return self._keeper.pid


class _Inside(subprocess.Popen[str]):
    """A command that nsenter started: signals go to the command, whose exit code nsenter passes on."""

    def inner(self) -> list[int]:
        try:
            return [
                int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            ]
        except OSError:
            return []

    def send_signal(self, number: int) -> None:
        for pid in self.inner() if self.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def why_not() -> str | None:
    """Why networks cannot be emulated here, in words; None where they can."""
    try:
        with Network(1, "100mbit"):
            return None
    except OSError as error:
        return str(error)
