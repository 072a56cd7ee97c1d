"""Hosts in namespaces and on the loopback: what runs there, what the links are, and that jobs span them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pufferfish.lab.network import Hosts, Loopback, Network, Shape, emulate, why_not

REASON = why_not()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3, "100mbit") as network:
        yield network


@pytest.fixture(params=["loopback", pytest.param("network", marks=needs_network)])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Loopback(2) if request.param == "loopback" else Network(2, "1gbit") as hosts:
        yield hosts


def said(hosts: Hosts, host: int, *command: str, env: dict[str, str] | None = None) -> str:
    process = hosts.run(host, command, env, stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return output


def behind(network: Network, *command: str) -> str:
    """Said by a command where the hosts' cables end."""
    line = network._enter(f"/proc/{network._root()}/ns/net", command)
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("100mbit", Shape(100)),
        ("1gbit", Shape(1000)),
        ("2.5Gbit", Shape(2500)),
        ("500kbit", Shape(0.5)),
        ("1gbit,delay=5ms", Shape(1000, 5)),
        ("1gbit, delay=250us", Shape(1000, 0.25)),
        ("10gbit", Shape(10_000)),  # can be predicted
    ],
)
def test_shapes(text: str, shape: Shape) -> None:
    assert Shape.parse(text) == shape
    assert Shape.parse(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "100",
        "mbit",
        "-1gbit",
        "1gbit,",
        "1gbit,5ms",
        "1gbit,delay=5",
        "1gbit,delay=5ms,x",
        "0mbit",
        "1tbit",
    ],
)
def test_bad_shapes(text: str) -> None:
    with pytest.raises(ValueError, match=r"[mM]bit"):
        Shape.parse(text)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="predicted, not emulated"):
        Network(2, "10gbit")
    for number in (0, 65):
        with pytest.raises(ValueError, match="hosts: choose 1 to 64"):
            Network(number, "1gbit")
    with pytest.raises(ValueError, match="delay"):
        Shape(100, -1)
    with pytest.raises(OSError, match="with block"):
        Network(2, "1gbit").run(0, ["true"])
    with Loopback(2) as hosts:
        with pytest.raises(ValueError, match="host 2: there are 0 to 1"):
            hosts.run(2, ["true"])
        with pytest.raises(ValueError, match="no command"):
            hosts.launch([])
        with pytest.raises(ValueError, match="0 workers a host"):
            hosts.launch(["x.py"], per_host=0)
        with pytest.raises(OSError, match="no link to cut"):
            hosts.cut(0)
    with Loopback(1) as hosts, pytest.raises(ValueError, match="one host"):
        hosts.measure()


def test_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match=r"networks need ip.*loopback"):
        hosts = emulate("1gbit", hosts=2)
    assert isinstance(hosts, Loopback)
    assert hosts.asked == "not shaped"


@needs_network
@pytest.mark.skipif(os.geteuid() != 0, reason="takes a right from root")
def test_without_rights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container: root, but the kernel refuses."""
    unshare = tmp_path / "unshare"
    real = subprocess.check_output(["which", "unshare"], text=True).strip()
    unshare.write_text(f'#!/bin/sh\nexec setpriv --bounding-set=-sys_admin {real} "$@"\n')
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(OSError, match=r"1gbit cannot be emulated: .*needs root"), Network(2, "1gbit"):
        pass
    with pytest.warns(UserWarning, match="loopback"):
        assert isinstance(emulate("1gbit", hosts=2), Loopback)


def test_commands(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert said(hosts, 1, "sh", "-c", "pwd; echo $WORD", env={"WORD": "a b"}) == f"{tmp_path}\na b\n"
    assert hosts.run(0, ["sh", "-c", "exit 7"]).wait() == 7
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = hosts.run(0, ["sleep", "1000"])
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
    assert hosts.running() == set()


def test_stop_ends_what_left_its_parent(hosts: Hosts) -> None:
    parent = hosts.run(
        0, ["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & echo; wait"], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    parent.kill()
    parent.wait()
    assert len(hosts.running()) == 2
    hosts.stop()
    assert hosts.running() == set()
    assert hosts.run(0, ["true"]).wait() == 0  # the hosts are still there
    parent.stdout.close()


def test_measure(hosts: Hosts) -> None:
    link = hosts.measure()
    assert link.asked == hosts.asked
    assert link.got_mbit > 0
    assert 0 < link.latency_ms < 1000
    assert hosts.running() == set()


@needs_network
def test_both_ends_of_every_link_are_shaped(network: Network) -> None:
    def rate(qdiscs: str, device: str) -> tuple[str, int]:
        (found,) = [q for q in json.loads(qdiscs) if q.get("dev") == device]
        return found["kind"], found["options"]["rate"] * 8

    ports = behind(network, "tc", "-j", "qdisc")
    for host in range(3):
        assert rate(said(network, host, "tc", "-j", "qdisc"), "eth0") == ("tbf", 100_000_000)
        assert rate(ports, f"port{host}") == ("tbf", 100_000_000)


@needs_network
def test_cut_and_restore(network: Network) -> None:
    """A port where nobody listens answers at once, unless the cable is out."""
    script = (
        "import socket; s = socket.socket(); s.settimeout(float(20)); print(s.connect_ex(('10.0.0.2', 9)))"
    )
    try:
        assert int(said(network, 0, sys.executable, "-c", script)) == errno.ECONNREFUSED
        network.cut(1)
        state = json.loads(said(network, 1, "ip", "-j", "link", "show", "eth0"))[0]
        assert "NO-CARRIER" in state["flags"]
        quick = script.replace("20", "0.2")
        assert int(said(network, 0, sys.executable, "-c", quick)) in (errno.EAGAIN, errno.EHOSTUNREACH)
    finally:
        network.restore(1)
    assert int(said(network, 0, sys.executable, "-c", script)) == errno.ECONNREFUSED
    with pytest.raises(ValueError, match="host 3"):
        network.cut(3)


@needs_network
def test_delay() -> None:
    with Network(3, "1gbit,delay=3ms") as network:
        assert network.asked == "1gbit,delay=3ms"
        assert network.measure().latency_ms >= 3
        assert said(network, 2, "getent", "ahostsv4", "host1").startswith("10.0.0.2 ")


@needs_network
def test_networks_do_not_see_each_other(network: Network) -> None:
    ours = network.run(0, ["sleep", "1000"])
    with Network(3, "10mbit") as other:
        theirs = other.run(0, ["sleep", "1000"])
        assert not network.running() & other.running()
        assert network.running()
    assert theirs.poll() == -signal.SIGKILL
    assert ours.poll() is None
    network.stop()


@needs_network
def test_in_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of those who are not root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Network(2, "1gbit,delay=1ms") as network:
        assert network.run(1, ["sh", "-c", "exit 7"]).wait() == 7
        assert network.measure().got_mbit > 0
        network.cut(1)
        network.restore(1)
        network.run(0, ["sleep", "1000"])
        network.stop()
        assert network.running() == set()


JOB = """
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, what = dist.get_rank(), sys.argv[1]
x = torch.full((500_000,), float(rank))
dist.all_reduce(x)
told = [rank, dist.get_world_size(), int(os.environ["LOCAL_RANK"]), int(x[0])]
sys.stdout.write(f"told {json.dumps(told)}\\n")  # in one piece
if what == "fail":
    sys.exit(3) if rank == 1 else time.sleep(1000)
if what == "wait":
    time.sleep(1000)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return str(path)


def reports(lines: list[str]) -> dict[int, list[int]]:
    """What each rank printed, and from which host."""
    found = {}
    for line in lines:
        host, _, text = line.partition(" | ")
        if text.startswith("told "):
            rank, *rest = json.loads(text.removeprefix("told "))
            found[rank] = [int(host.removeprefix("host")), *rest]
    return found


@needs_network
@pytest.mark.timeout(120)
def test_a_job_of_all_hosts(job: str) -> None:
    def sent(host: int) -> int:
        (eth0,) = json.loads(said(network, host, "ip", "-j", "-s", "link", "show", "eth0"))
        return int(eth0["stats64"]["tx"]["bytes"])

    lines: list[str] = []
    with Network(2, "100mbit") as network:
        before = [sent(host) for host in (0, 1)]
        assert network.launch([job, "end"], write=lines.append) == 0
        after = [sent(host) for host in (0, 1)]
        assert network.running() == set()
    assert reports(lines) == {0: [0, 2, 0, 1], 1: [1, 2, 0, 1]}
    for b, a in zip(before, after, strict=True):  # of a ring of two each sends half twice: 2 MB
        assert 2_000_000 < a - b < 2_500_000


@needs_network
@pytest.mark.timeout(120)
def test_one_host_fails(job: str) -> None:
    lines: list[str] = []
    with Network(2, "1gbit") as hosts:
        assert hosts.launch([job, "fail"], write=lines.append, grace=1) == 1
        assert hosts.running() == set()
    assert set(reports(lines)) == {0, 1}


@pytest.mark.timeout(120)
def test_ctrl_c(job: str) -> None:
    """Agents are told to end, the workers end with them, and the interrupt goes on."""

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(reports(lines)) == 2 and "told" in line:
            signal.raise_signal(signal.SIGINT)

    lines: list[str] = []
    with Loopback(2) as hosts:
        with pytest.raises(KeyboardInterrupt):
            hosts.launch([job, "wait"], write=interrupt)
        assert hosts.running() == set()


def test_output_that_cannot_be_written() -> None:
    def broken(line: str) -> None:
        raise BrokenPipeError("nobody reads")

    with Loopback(1) as hosts:
        with pytest.raises(BrokenPipeError, match="nobody reads"):
            hosts.launch(["no-such-script.py"], write=broken, grace=1)
        assert hosts.running() == set()
