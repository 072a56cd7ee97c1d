"""`Network`: emulated hosts on this machine, with a link of a given rate and delay between them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hosts import Hosts

#: Packets that would wait longer than this for a link are dropped.
_QUEUE_MS = 50
#: Script of the first process. $1: hosts, $2: bit/s, $3: burst in bytes, $4: queue in ms; then optionally the command
#: of a switch that replaces the bridge and the script.
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
    # Do not use the system's congestion control: bbr is slower here, and cubic takes delayed packets for congestion.
    ip -n host$i route replace 10.0.0.0/24 dev eth0 src $address congctl reno
    printf '%s host'$i'\n' $address ::ffff:$address >> /run/netns/hosts
    i=$((i + 1))
done
mount --bind /run/netns/hosts /etc/hosts || true # otherwise torch queries a name server, and warns
[ $# -eq 0 ] || exec "$@"
echo ready
exec cat >/dev/null 2>&1
"""


class Network(Hosts):
    """Hosts on a separate network, each behind a link such as "100mbit" or "1gbit,delay=5ms".

    Needs Linux, iproute2, util-linux, and root or user namespaces; entering the context raises OSError with what is
    missing. Rates include packet headers; the goodput is about 95 % of the rate.

    >>> if not unavailable_reason():
    ...     with Network(2, "100mbit") as network:
    ...         code = network.run(0, ["true"]).wait()
    """

    interface = "eth0"

    def __init__(self, hosts: int = 4, link: str | LinkShape = "1gbit") -> None:
        super().__init__(hosts)
        self.shape = link if isinstance(link, LinkShape) else LinkShape.parse(link)
        self.shape.check_emulable()
        self.requested_link = str(self.shape)
        self._first_process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        super().__enter__()
        if sys.platform != "linux":
            raise OSError("networks can be emulated on Linux only")
        for tool in ("ip", "tc", "unshare", "nsenter"):
            if not shutil.which(tool):
                raise OSError(
                    f"emulated networks need {tool}, which is not installed; install iproute2 and util-linux"
                )
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def address(self, host: int) -> str:
        return f"10.0.0.{host + 1}"

    def free_port(self) -> int:
        return 29500  # no other processes use this network

    def cut(self, host: int) -> None:
        self._set_port(host, "down")

    def restore(self, host: int) -> None:
        self._set_port(host, "up")

    def close(self) -> None:
        """End all processes, then remove the network."""
        # nsenter stops with a stopped command, and the kernel would wait for it.
        for process in self._started:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        if self._first_process is not None:
            self._first_process.communicate()  # closes the pipe and waits for all processes
            self._first_process = None
        self._reap()

    def _set_up(self) -> None:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        shape = self.shape
        parameters = self.hosts, round(shape.mbit * 1e6), shape.burst, _QUEUE_MS
        delay = str(shape.delay_ms / 1e3)
        switch = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("delay_switch.py")),
            str(self.hosts),
            delay,
        ]
        self._first_process = subprocess.Popen(
            ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", _SETUP, "pufferfish-network", *map(str, parameters), *(switch if shape.delay_ms else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._first_process.stdout is not None
        if self._first_process.stdout.readline() != "ready\n":
            _, errors = self._first_process.communicate()
            reason = (errors.strip() or "the set-up script was killed").splitlines()[-1]
            if reason.startswith("unshare:"):
                reason += "; this needs root with CAP_SYS_ADMIN, or user namespaces"
            raise OSError(f"network {self.requested_link} cannot be emulated: {reason}")

    def _popen(self, host: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        process = _NamespacePopen(self._enter(self._path(host), command), **settings)
        while process.poll() is None and not process.children():
            time.sleep(0.001)
        return process

    def _set_port(self, host: int, state: str) -> None:
        self._check(host)
        command = self._enter(f"/proc/{self._pid()}/ns/net", ["ip", "link", "set", f"port{host}", state])
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def _enter(self, network: str, command: Sequence[str]) -> list[str]:
        """Command line that runs `command` in the namespaces, with this network namespace and the current directory."""
        pid = self._pid()
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return [
            "nsenter", f"--target={pid}", *user, "--mount", f"--net={network}",
            f"--pid=/proc/{pid}/ns/pid_for_children", "--", "env", f"--chdir={os.getcwd()}", *command,
        ]  # fmt: skip

    def _path(self, host: int) -> str:
        return f"/proc/{self._pid()}/root/run/netns/host{host}"

    def _pid(self) -> int:
        if self._first_process is None or self._first_process.poll() is not None:
            raise OSError(f"network {self.requested_link} is not set up; use it in a with block")
        return self._first_process.pid


class _NamespacePopen(subprocess.Popen[str]):
    """Process of nsenter: signals go to the command that it started, whose exit code it returns."""

    def children(self) -> list[int]:
        try:
            return list(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))
        except OSError:
            return []

    def send_signal(self, number: int) -> None:
        own = [self.pid] if number == signal.SIGCONT else []  # it stops with a stopped command
        for pid in [*own, *self.children()] if self.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def unavailable_reason() -> str | None:
    """Reason why networks cannot be emulated on this machine; None if they can."""
    try:
        with Network(1, "100mbit"):
            return None
    except OSError as error:
        return str(error)


_RATES = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_TIMES = {"us": 1e-3, "ms": 1.0, "s": 1e3}
#: From this rate on, a CPU that runs all hosts is slower than the link.
_MAX_MBIT = 10_000
#: Seconds per message on a good network, beside the delay that a link states.
LATENCY = 5e-5


@dataclass(frozen=True)
class LinkShape:
    """Rate and delay of a host's link.

    >>> LinkShape.parse("2.5gbit, delay=500us")
    LinkShape(mbit=2500.0, delay_ms=0.5)
    >>> print(LinkShape(100))
    100mbit
    """

    mbit: float  # rate in Mbit/s, each way
    delay_ms: float = 0.0  # one-way delay between two hosts in milliseconds

    def __post_init__(self) -> None:
        if not 0.1 <= self.mbit < float("inf"):
            raise ValueError(f"link rate must be at least 0.1 Mbit/s, got {self.mbit:g}")
        if not 0 <= self.delay_ms <= 10_000:
            raise ValueError(f"link delay must be between 0 and 10,000 ms, got {self.delay_ms:g}")

    @classmethod
    def parse(cls, text: str) -> LinkShape:
        """Parse a rate with an optional one-way delay."""
        rate, *rest = text.lower().replace(" ", "").split(",")
        mbit = _parse_quantity(rate, _RATES)
        delay = _parse_quantity(rest[0].removeprefix("delay="), _TIMES) if rest else 0.0
        if mbit is None or delay is None or len(rest) > 1 or (rest and not rest[0].startswith("delay=")):
            raise ValueError(f"invalid network {text!r}: write it as 100mbit, 1gbit or 1gbit,delay=5ms")
        return cls(mbit, delay)

    def __str__(self) -> str:
        rate = f"{self.mbit / 1e3:g}gbit" if self.mbit >= 1e3 else f"{self.mbit:g}mbit"
        return f"{rate},delay={self.delay_ms:g}ms" if self.delay_ms else rate

    def check_emulable(self) -> None:
        """Raise ValueError if the link is too fast to be emulated.

        >>> LinkShape.parse("10gbit").check_emulable()
        Traceback (most recent call last):
        ValueError: network 10gbit can be predicted, but is too fast to be emulated; use less than 10gbit
        """
        if self.mbit >= _MAX_MBIT:
            raise ValueError(
                f"network {self} can be predicted, but is too fast to be emulated; use less than 10gbit"
            )

    @property
    def burst(self) -> int:
        """Bytes that may leave at once: one millisecond's worth. Fewer reduce the rate, more speed up small messages."""
        return max(16 * 1024, round(self.mbit * 125))


def _parse_quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+\.?\d*)([a-z]+)", text)
    if not match or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]
