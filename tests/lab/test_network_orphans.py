"""Nothing is left of a network after its owner has ended, for any reason."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pufferfish.lab.network import Hosts, Loopback, Network, kill_orphans, unavailable_reason
from pufferfish.lab.network.orphans import TAG_VARIABLE, owner_id, tagged_processes

REASON = unavailable_reason()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}")
fork = mp.get_context("fork")  # a new interpreter would take seconds to import torch

if sys.platform != "linux":
    pytest.skip("needs /proc", allow_module_level=True)


class Owner:
    """A process that owns hosts with processes that ignore signals."""

    def __init__(self, kind: type[Hosts]) -> None:
        self.pipe, end = fork.Pipe()
        self.process = fork.Process(target=self._own, args=(kind, end), daemon=True)
        self.process.start()
        self.name = self.pipe.recv()
        self.networks = {network(pid) for pid in self.processes()} - {network(os.getpid())}

    @staticmethod
    def _own(kind: type[Hosts], pipe: Connection) -> None:
        with kind(2) as hosts:
            for host in range(2):
                hosts.run(host, ["sh", "-c", "trap '' TERM INT HUP; setsid sleep 1000 & sleep 1000"])
            pipe.send(owner_id())
            pipe.recv()

    def processes(self) -> set[int]:
        return {pid for pid, tag in tagged_processes().items() if tag.startswith(f"{self.name}/")}

    def end(self, number: int | None = None) -> None:
        """Kill the owner with a signal, or let it exit."""
        if number is None:
            self.pipe.send(True)
        else:
            os.kill(self.process.pid or 0, number)
        self.process.join(30)
        assert self.process.exitcode == (-number if number else 0)


def network(pid: int) -> int | None:
    """The network namespace of a process; None when it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


def outside() -> list[list[str]]:
    """Named namespaces, links and mounts of this machine."""
    places = [Path("/run/netns"), Path("/sys/class/net")]
    names = [sorted(p.name for p in place.iterdir()) if place.exists() else [] for place in places]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [*names, sorted(line.split()[1] for line in mounts)]


@needs_network
@pytest.mark.timeout(120)
@pytest.mark.parametrize("runs", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_runs_half_of_them_killed(runs: int) -> None:
    before = outside()
    bystander = Owner(Network)
    running = bystander.processes()
    for run in range(runs):
        one = Owner(Network)
        assert one.networks
        assert not one.networks & bystander.networks
        one.end((None, signal.SIGKILL, None, signal.SIGTERM)[run % 4])
        kill_orphans()
        assert one.processes() == set()
        everyone = {network(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
        assert not one.networks & everyone
    assert bystander.processes() >= running
    bystander.end()
    assert bystander.processes() == set()
    assert outside() == before


@needs_network
def test_the_kernel_ends_a_network_without_its_owner() -> None:
    """Without `kill_orphans`."""
    one = Owner(Network)
    one.end(signal.SIGKILL)
    while one.processes():  # the test's timeout is the guard
        pass


def test_kill_orphans_of_a_loopback() -> None:
    bystander, one = Owner(Loopback), Owner(Loopback)
    one.end(signal.SIGKILL)
    assert len(one.processes()) >= 4
    assert kill_orphans() >= 4
    assert one.processes() == set()
    assert bystander.processes()
    bystander.end()
    assert bystander.processes() == set()


def test_another_process_with_the_owners_number() -> None:
    """PIDs are reused: an owner is identified by its start time too. Owners in other PID namespaces are never orphans."""
    where, pid, start = owner_id().split(":")
    cases = {
        f"{where}:{pid}:{start}": False,
        f"{where}:{pid}:1": True,
        f"1:{pid}:1": False,
        "nonsense": False,
    }
    for name, orphaned in cases.items():
        process = subprocess.Popen(["sleep", "1000"], env={**os.environ, TAG_VARIABLE: f"{name}/0/0"})
        try:
            kill_orphans()
            assert (process.poll() is not None) == orphaned, name
        finally:
            process.kill()
            process.wait()
