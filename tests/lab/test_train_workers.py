"""The loop on several workers: in a group that is there, under torchrun, started by the command, and simulated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train import SMALL, Stopped, values, weights

from processes import in_processes
from pufferfish.cli import main
from pufferfish.lab.network import Loopback, why_not
from pufferfish.lab.network.clean import marked
from pufferfish.lab.train import Settings, train
from pufferfish.lab.train import launch_workers as start
from pufferfish.lab.train.choice import choice
from pufferfish.lab.train.screen import Screen
from pufferfish.measure import read

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
#: Two workers give the same bits; with more, sums may differ in the last one.
METHODS = (
    "dense",
    "powersgd-4",
    "topk-0.01",
    "pufferfish+powersgd-4",
    "early-bird-0.5+powersgd-2",
    "lottery-ticket-1",
)


def settings(folder: Path, method: str, size: int) -> Settings:
    """With dropout, BatchNorm, a switch and accumulation in it."""
    recipe = replace(Stopped().recipe("short"), epochs=2 if size == 2 else 1, switch_at=1, clip=1.0)
    return Settings(
        choice(method), recipe, folder / f"{method}-{size}", accumulate=2, quiet=True, save_every=9
    )


def real(rank: int, size: int, folder: str) -> None:
    for method in METHODS if size == 2 else METHODS[:3]:
        given = settings(Path(folder), method, size)
        found = train(Stopped(), given, link={"asked": "1gbit", "got_mbit": 941.0, "latency_ms": 0.2})
        assert found is not None
        assert found["training_seconds"] > found["seconds_a_step"] > 0
    assert torch.distributed.is_initialized()  # whose it was, it still is


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_simulated_equals_real(size: int, tmp_path: Path) -> None:
    """One job trains one run after the other; then one process plays its workers."""
    in_processes(real, size, str(tmp_path / "real"))
    for method in METHODS if size == 2 else METHODS[:3]:
        given = settings(tmp_path / "simulated", method, size)
        train(Stopped(), replace(given, simulate=size))
        one, other = read(tmp_path / "real" / given.folder.name), read(given.folder)
        assert one.link == {"asked": "1gbit", "got_mbit": 941.0, "latency_ms": 0.2}
        assert one.workers == other.workers == size
        assert values(one, "bytes") == values(other, "bytes")
        rows = [values(run, "loss") + values(run, "valid/accuracy") for run in (one, other)]
        ours, theirs = weights(given.folder), weights(tmp_path / "real" / given.folder.name)
        if size == 2:
            assert rows[0] == rows[1], method
            assert all(torch.equal(x, theirs[name]) for name, x in ours.items()), method
            assert one.results["accuracy"] == other.results["accuracy"]
        else:
            for name, x in ours.items():
                torch.testing.assert_close(
                    x, theirs[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )


FAILS = """
import os, signal
import torch.distributed as dist
from dataclasses import dataclass
from pufferfish.lab.tasks.digits import Digits

passes = 0

@dataclass(frozen=True)
class Fails(Digits):
    model: str = "mlp"
    width: int = 16

    def loss(self, *given):
        global passes
        passes += 1
        if passes == 50 and dist.is_initialized() and dist.get_rank() == 1 and not os.path.exists("failed"):
            open("failed", "x").close()
            {fails}
        return super().loss(*given)
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.timeout(200)
def test_a_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, with a switch and compression: the run is the same as if nobody had killed it."""
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(FAILS.format(fails=KILLED))
    words = ["train", "fails.py:Fails", "--epochs", "4", "--method", "pufferfish", "--compress", "powersgd-2",
             "--save-every", "7", "--device", "cpu"]  # fmt: skip
    command = [*TORCHRUN, "-m", "pufferfish", *words, "--out", "killed"]
    assert subprocess.run(command, env=ENV, capture_output=True, timeout=90).returncode
    assert read("killed").finished is None
    subprocess.run(command, env=ENV, check=True, capture_output=True, timeout=90)
    assert main([*words, "--workers", "2", "--simulate", "--out", "straight"]) == 0
    straight, again = read("straight"), read("killed")
    for name in ("loss", "bytes", "valid/accuracy"):
        assert values(again, name) == values(straight, name)
    assert again.results["accuracy"] == straight.results["accuracy"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fails", "code", "told"),
    [
        ("raise ZeroDivisionError('of rank one')", 1, "ZeroDivisionError: of rank one"),
        pytest.param("raise ValueError('of rank one')", 2, "train: of rank one", marks=pytest.mark.slow),
        pytest.param(KILLED, 1, "a worker was ended by signal 9; ", marks=pytest.mark.slow),
    ],
)
def test_a_worker_fails(
    fails: str,
    code: int,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What broke is told, and not what broke because of it: the others' connections, their launcher."""
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(FAILS.format(fails=fails))
    assert main(["train", "fails.py:Fails", "--workers", "2", "--device", "cpu", "--out", "run"]) == code
    errors = capsys.readouterr().err
    assert told in errors
    assert errors.count("Traceback") == ("ZeroDivisionError" in fails)
    assert not [pid for pid, mark in marked().items() if f":{os.getpid()}:" in mark]


@pytest.mark.timeout(320)
def test_stopped_workers_go_on(tmp_path: Path) -> None:
    """Ctrl-C, then SIGTERM of the command: a checkpoint, nothing left, and the same command goes on."""
    words = ["train", "digits:mlp,width=4", "--epochs", "10000", "--device", "cpu", "--workers", "2"]
    command = [sys.executable, "-m", "pufferfish", *words, "--out", "run"]
    done = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        job = subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)  # fmt: skip
        assert job.stderr is not None
        try:
            if done:
                assert job.stderr.readline() == f"goes on after update {done} of 200000\n"
            first = job.stderr.readline()
            job.send_signal(number)
            output, errors = job.communicate(timeout=150)
        finally:
            job.kill()
        assert job.returncode == 130
        assert not output
        assert int(first.removeprefix("epoch ").split("/")[0]) == done // 20 + 1
        told = errors.splitlines()[-1]
        assert told.endswith("all is saved; the same command goes on")
        assert "Traceback" not in errors
        done = int(told.split()[2])
        assert not [pid for pid, mark in marked().items() if f":{job.pid}:" in mark]
    assert done // 20 == len(values(read(tmp_path / "run"), "valid/accuracy"))


@pytest.mark.timeout(120)
def test_on_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was asked and got is shown and kept; and workers are not started where another run is."""
    if reason := why_not():
        pytest.skip(f"no emulated network: {reason}")
    words = [*SMALL, "--network", "100mbit", "--hosts", "2", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith("dense: test accuracy")
    assert said.err.startswith("link: asked 100mbit, got ")
    run = read(tmp_path / "run")
    assert (run.hosts, run.workers) == (2, 2)
    assert run.link is not None
    assert run.link["asked"] == "100mbit"
    assert 50 < run.link["got_mbit"] < 101
    assert main([*words, "--lr", "0.3"]) == 2
    assert capsys.readouterr().err == (
        f"pufferfish train: {tmp_path / 'run'}: it holds a run with lr 0.1, not 0.3; choose another --out\n"
    )


@pytest.mark.timeout(120)
def test_hosts_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing shapes their link, and that is said."""
    assert main([*SMALL, "--hosts", "2", "--out", str(tmp_path / "run")]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "the hosts are joined by the plain loopback, not shaped; say --network, such as 100mbit"


def test_without_a_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system allows none the loopback takes its place, and says so."""
    monkeypatch.setattr("pufferfish.lab.network.loopback.why_not", lambda: "no rights here")
    with start._emulated("1gbit", 2, Screen()) as hosts:
        assert isinstance(hosts, Loopback)
    said = capsys.readouterr().err
    assert "no rights here. The plain loopback takes its place" in said
    assert said.count("\n") == 1
