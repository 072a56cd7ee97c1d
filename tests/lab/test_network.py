"""Hosts in namespaces and on the loopback: processes, links, and jobs that span hosts."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from on_hosts import on_hosts

from pufferfish.lab.network import Hosts, LinkShape, Network, unavailable_reason

REASON = unavailable_reason()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3, "100mbit") as network:
        yield network


@pytest.fixture(params=["loopback", pytest.param("network", marks=needs_network)])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts(2) if request.param == "loopback" else Network(2, "1gbit") as hosts:
        yield hosts


def output_of(hosts: Hosts, host: int, *command: str, env: dict[str, str] | None = None) -> str:
    process = hosts.run(host, command, env, stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return output


def on_the_switch(network: Network, *command: str) -> str:
    """Output of a command in the namespace of the bridge."""
    line = network._enter(f"/proc/{network._pid()}/ns/net", command)
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("100mbit", LinkShape(100)),
        ("2.5Gbit", LinkShape(2500)),
        ("500kbit", LinkShape(0.5)),
        ("1gbit, delay=250us", LinkShape(1000, 0.25)),
        ("10gbit", LinkShape(10_000)),  # can be predicted
    ],
)
def test_shapes(text: str, shape: LinkShape) -> None:
    assert LinkShape.parse(text) == shape
    assert LinkShape.parse(str(shape)) == shape


@pytest.mark.parametrize("text", ["", "100", "-1gbit", "1gbit,5ms", "1gbit,delay=5ms,x", "0mbit"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(ValueError, match=r"[mM]bit"):
        LinkShape.parse(text)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="too fast to be emulated"):
        Network(2, "10gbit")
    for number in (0, 65):
        with pytest.raises(ValueError, match="hosts must be between 1 and 64"):
            Network(number, "1gbit")
    with pytest.raises(ValueError, match="delay"):
        LinkShape(100, -1)
    with pytest.raises(OSError, match="with block"):
        Network(2, "1gbit").run(0, ["true"])
    with Hosts(2) as hosts:
        with pytest.raises(ValueError, match="host 2 does not exist; hosts are 0 to 1"):
            hosts.run(2, ["true"])
        with pytest.raises(ValueError, match="command is empty"):
            hosts.launch([])
        with pytest.raises(ValueError, match="workers per host must be between 1 and 64, got 0"):
            hosts.launch(["x.py"], per_host=0)
        with pytest.raises(OSError, match="no link to cut"):
            hosts.cut(0)
    with Hosts(1) as hosts, pytest.raises(ValueError, match="single host"):
        hosts.measure()


def test_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert str(unavailable_reason()).startswith("emulated networks need ip, which is not installed")


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


def test_commands(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_of(hosts, 1, "sh", "-c", "pwd; echo $WORD", env={"WORD": "a b"}) == f"{tmp_path}\na b\n"
    assert hosts.run(0, ["sh", "-c", "exit 7"]).wait() == 7
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = hosts.run(0, ["sleep", "1000"])
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
    assert hosts.process_ids() == set()


def state_of(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.timeout(60)  # the hang guard
def test_a_stopped_command_continues_or_ends_with_its_host(hosts: Hosts) -> None:
    processes = [hosts.run(0, ["sh", "-c", "kill -STOP $$; exit 5"]) for _ in range(2)]
    for process in processes:
        while state_of(process) != "T":
            pass
    processes[0].send_signal(signal.SIGCONT)
    assert processes[0].wait(timeout=30) == 5
    hosts.close()
    assert processes[1].poll() is not None


def test_stop_ends_what_left_its_parent(hosts: Hosts) -> None:
    parent = hosts.run(
        0, ["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & echo; wait"], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    parent.kill()
    parent.wait()
    assert len(hosts.process_ids()) == 2
    hosts.stop()
    assert hosts.process_ids() == set()
    assert hosts.run(0, ["true"]).wait() == 0  # the hosts are still there
    parent.stdout.close()


def test_measure(hosts: Hosts) -> None:
    link = hosts.measure()
    assert link.asked == hosts.requested_link
    assert link.got_mbit > 0
    assert 0 < link.latency_ms < 1000
    assert hosts.process_ids() == set()


@needs_network
def test_both_ends_of_every_link_are_shaped(network: Network) -> None:
    def rate(qdiscs: str, device: str) -> tuple[str, int]:
        (found,) = [q for q in json.loads(qdiscs) if q.get("dev") == device]
        return found["kind"], found["options"]["rate"] * 8

    ports = on_the_switch(network, "tc", "-j", "qdisc")
    for host in range(3):
        assert rate(output_of(network, host, "tc", "-j", "qdisc"), "eth0") == ("tbf", 100_000_000)
        assert rate(ports, f"port{host}") == ("tbf", 100_000_000)


@needs_network
def test_cut_and_restore(network: Network) -> None:
    """A closed port refuses a connection at once, unless the link is cut."""
    script = (
        "import socket; s = socket.socket(); s.settimeout(float(20)); print(s.connect_ex(('10.0.0.2', 9)))"
    )
    try:
        assert int(output_of(network, 0, sys.executable, "-c", script)) == errno.ECONNREFUSED
        network.cut(1)
        state = json.loads(output_of(network, 1, "ip", "-j", "link", "show", "eth0"))[0]
        assert "NO-CARRIER" in state["flags"]
        quick = script.replace("20", "0.2")
        assert int(output_of(network, 0, sys.executable, "-c", quick)) in (errno.EAGAIN, errno.EHOSTUNREACH)
    finally:
        network.restore(1)
    assert int(output_of(network, 0, sys.executable, "-c", script)) == errno.ECONNREFUSED
    with pytest.raises(ValueError, match="host 3"):
        network.cut(3)


@needs_network
def test_delay() -> None:
    with Network(3, "1gbit,delay=3ms") as network:
        assert network.requested_link == "1gbit,delay=3ms"
        assert network.measure().latency_ms >= 3
        assert output_of(network, 2, "getent", "ahostsv4", "host1").startswith("10.0.0.2 ")


@needs_network
def test_in_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users other than root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)
    with Network(2, "1gbit,delay=1ms") as network:
        assert network.run(1, ["sh", "-c", "exit 7"]).wait() == 7
        assert network.measure().got_mbit > 0
        network.cut(1)
        network.restore(1)
        network.run(0, ["sleep", "1000"])
        network.stop()
        assert network.process_ids() == set()


JOB = """
import json, os, sys, time
rank, size, local, mode = *(int(os.environ[x]) for x in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), sys.argv[1]
total = 0
if mode == "end":  # the others do not need torch, which takes seconds to import
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.full((500_000,), float(rank))
    dist.all_reduce(x)
    total = int(x[0])
sys.stdout.write(f"report {json.dumps([rank, size, local, total])}\\n")  # in one piece
if mode == "fail" and rank == 1:
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    sys.exit(3)
if mode != "end":
    sys.stdout.flush()
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
    """[host, world size, local rank, sum] by rank, from the job's output."""
    found = {}
    for line in lines:
        host, _, text = line.partition(" | ")
        if text.startswith("report "):
            rank, *rest = json.loads(text.removeprefix("report "))
            found[rank] = [int(host.removeprefix("host")), *rest]
    return found


@needs_network
@pytest.mark.timeout(120)
def test_a_job_of_all_hosts(job: str) -> None:
    def sent(host: int) -> int:
        (eth0,) = json.loads(output_of(network, host, "ip", "-j", "-s", "link", "show", "eth0"))
        return int(eth0["stats64"]["tx"]["bytes"])

    lines: list[str] = []
    with Network(2, "100mbit") as network:
        before = [sent(host) for host in (0, 1)]
        assert network.launch([job, "end"], write=lines.append) == 0
        after = [sent(host) for host in (0, 1)]
        assert network.process_ids() == set()
    assert reports(lines) == {0: [0, 2, 0, 1], 1: [1, 2, 0, 1]}
    for b, a in zip(before, after, strict=True):  # in a ring of two each sends half twice: 2 MB
        assert 2_000_000 < a - b < 2_500_000


@needs_network
@pytest.mark.timeout(120)
def test_one_host_fails(job: str, tmp_path: Path) -> None:
    def write(line: str) -> None:
        lines.append(line)
        if set(reports(lines)) == {0, 1}:
            (tmp_path / "fail").touch()

    lines: list[str] = []
    with Network(2, "1gbit") as hosts:
        assert hosts.launch([job, "fail", str(tmp_path / "fail")], write=write, grace=1) == 1
        assert hosts.process_ids() == set()
    assert set(reports(lines)) == {0, 1}


@pytest.mark.timeout(120)
def test_ctrl_c(job: str) -> None:
    """Agents get SIGTERM, their workers end with them, and KeyboardInterrupt propagates."""

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(reports(lines)) == 2 and "report" in line:
            signal.raise_signal(signal.SIGINT)

    lines: list[str] = []
    with Hosts(2) as hosts:
        with pytest.raises(KeyboardInterrupt):
            hosts.launch([job, "wait"], write=interrupt)
        assert hosts.process_ids() == set()


def own_job(pipe: Connection, job: str) -> None:
    with Hosts(1) as hosts:
        hosts.launch([job, "wait"], per_host=2, write=pipe.send)


@pytest.mark.timeout(120)
def test_a_job_ends_when_its_owner_is_killed(job: str) -> None:
    """On the loopback, where no namespace ends with its first process."""
    ours, theirs = mp.get_context("fork").Pipe()
    owner = mp.get_context("fork").Process(target=own_job, args=(theirs, job), daemon=True)
    owner.start()
    lines: list[str] = []
    while len(reports(lines)) < 2:
        lines.append(ours.recv())
    assert owner.pid is not None
    assert len(on_hosts(owner.pid)) >= 3
    owner.kill()
    while on_hosts(owner.pid):  # the test's timeout is the guard
        pass


def own_network(pipe: Connection) -> None:
    with Network(2) as network:
        for host in range(2):
            network.run(host, ["sh", "-c", "trap '' TERM INT HUP; setsid sleep 1000 & sleep 1000"])
        pipe.send(True)
        pipe.recv()


def namespaces(pids: set[int]) -> set[int]:
    return {Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in pids}


def outside() -> list[list[str]]:
    """Named namespaces, links and mounts of this machine."""
    places = [Path("/run/netns"), Path("/sys/class/net")]
    names = [sorted(p.name for p in place.iterdir()) if place.exists() else [] for place in places]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [*names, sorted(line.split()[1] for line in mounts)]


@needs_network
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_network(network: Network, number: signal.Signals | None) -> None:
    """After its owner has ended, for any reason; other networks stay."""
    before, bystander = outside(), network.run(0, ["sleep", "1000"])
    ours, theirs = mp.get_context("fork").Pipe()
    owner = mp.get_context("fork").Process(target=own_network, args=(theirs,), daemon=True)
    owner.start()
    ours.recv()
    assert owner.pid is not None
    gone = namespaces(on_hosts(owner.pid)) - namespaces({os.getpid()})
    assert len(gone) == 2
    if number is None:
        ours.send(True)
    else:
        os.kill(owner.pid, number)
    owner.join(30)
    while on_hosts(owner.pid):  # the test's timeout is the guard
        pass
    there = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            there.add((folder / "ns/net").stat().st_ino)
    assert not gone & there
    assert outside() == before
    assert bystander.poll() is None
    network.stop()


def test_output_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(line: str) -> None:
        raise BrokenPipeError("closed")

    monkeypatch.setattr(sys, "executable", "echo")  # an agent that prints its arguments
    with Hosts(1) as hosts:
        with pytest.raises(BrokenPipeError, match="closed"):
            hosts.launch(["job.py"], write=broken, grace=1)
        assert hosts.process_ids() == set()


@pytest.mark.timeout(120)
def test_modules_of_the_working_folder_replace_none_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the agent nor in the workers; a module that exists only there is found."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("open('imported', 'x')")
    (tmp_path / "mine.py").write_text(
        "import os, sys, torch\nprint('report', torch.__name__ + os.environ['RANK'], *sys.argv[1:], __name__)\n"
    )
    lines: list[str] = []
    with Hosts(1) as hosts:
        assert hosts.launch(["-m", "mine", "-c", "a b"], per_host=1, write=lines.append) == 0
    found = [line.partition("report ")[2] for line in lines if "report" in line]
    assert found == ["torch0 -c a b __main__"]
    assert not (tmp_path / "imported").exists()
