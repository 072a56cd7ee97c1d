"""`pufferfish train` on several workers: in an existing group, under torchrun, launched by the command, and simulated."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from on_hosts import on_hosts
from test_train import SMALL, Stopped, values, weights
from torch.multiprocessing import ProcessExitedException

from processes import as_torchrun, forked, free_port, in_processes
from pufferfish.cli import main
from pufferfish.lab.method_name import training_method
from pufferfish.lab.network import Hosts, unavailable_reason
from pufferfish.lab.train import RunSettings, train
from pufferfish.measure import read_run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LINK = {"asked": "1gbit", "got_mbit": 941.0, "latency_ms": 0.2}
#: (method, workers). The first covers plain and compressed steps, the switch and low-rank steps.
SIMULATED = [
    ("pufferfish+powersgd(4)", 2),
    ("topk(0.01)", 2),
    pytest.param("early-bird(0.5)+powersgd(2)", 2, marks=pytest.mark.slow),
    pytest.param("lottery-ticket(1)", 2, marks=pytest.mark.slow),
    pytest.param("dense", 2, marks=pytest.mark.slow),
    pytest.param("dense", 4, marks=pytest.mark.slow),
    pytest.param("powersgd(4)", 4, marks=pytest.mark.slow),
    pytest.param("topk(0.01)", 4, marks=pytest.mark.slow),
]


def settings(folder: Path, method: str) -> RunSettings:
    """With dropout, BatchNorm, a switch and accumulation."""
    recipe = replace(Stopped().recipe("short"), epochs=2, batch=240, switch_at=1, clip=1.0)
    return RunSettings(training_method(method), recipe, folder, accumulate=2, quiet=True, save_every=3)


def real(rank: int, size: int, folder: str, method: str) -> None:
    results = train(Stopped(), settings(Path(folder), method), link=LINK)
    assert results is not None
    assert results["training_seconds"] > results["seconds_a_step"] > 0
    assert torch.distributed.is_initialized()  # the group is the caller's


@pytest.mark.parametrize(("method", "size"), SIMULATED)
def test_simulated_equals_real(method: str, size: int, tmp_path: Path) -> None:
    """Two simulated workers are bit-identical to real ones; with more, sums may differ in the last bit."""
    in_processes(real, size, str(tmp_path / "real"), method)
    train(Stopped(), replace(settings(tmp_path / "simulated", method), simulate=size))
    one, other = read_run(tmp_path / "real"), read_run(tmp_path / "simulated")
    assert one.link == LINK
    assert one.workers == other.workers == size
    assert values(one, "bytes") == values(other, "bytes")
    theirs = weights(tmp_path / "real")
    if size == 2:
        for name in ("loss", "valid/accuracy"):
            assert values(one, name) == values(other, name)
        assert one.results["accuracy"] == other.results["accuracy"]
    for name, x in weights(tmp_path / "simulated").items():
        tolerance = 0.0 if size == 2 else 1e-4
        torch.testing.assert_close(x, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


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
        if passes == 30 and dist.is_initialized() and dist.get_rank() == 1 and not os.path.exists("failed"):
            open("failed", "x").close()
            {fails}
        return super().loss(*given)
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def as_a_worker(rank: int, size: int, port: int, words: list[str]) -> None:
    as_torchrun(rank, size, port)
    assert main(words) == 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_worker(torchrun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a switch and compression: the restarted run is bit-identical to an uninterrupted one."""
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(FAILS.format(fails=KILLED))
    words = ["train", "fails.py:Fails", "--epochs", "3", "--method", "pufferfish+powersgd(2)",
             "--save-every", "7", "--device", "cpu"]  # fmt: skip
    if torchrun:
        command = [*TORCHRUN, "--max-restarts", "1", "-m", "pufferfish", *words, "--out", "killed"]
        subprocess.run(command, env=ENV, check=True, capture_output=True, timeout=150)
    else:
        for ends in (pytest.raises(ProcessExitedException, match="SIGKILL"), contextlib.nullcontext()):
            with ends:
                forked(as_a_worker, 2, (2, free_port(), [*words, "--out", "killed"]), name="train")
    assert Path("failed").exists()
    assert main([*words, "--per-node", "2", "--simulate", "--out", "straight"]) == 0
    straight, again = read_run("straight"), read_run("killed")
    for name in ("loss", "bytes", "valid/accuracy"):
        assert values(again, name) == values(straight, name)
    assert again.results["accuracy"] == straight.results["accuracy"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fails", "code", "message"),
    [
        ("raise ZeroDivisionError('of rank one')", 1, "ZeroDivisionError: of rank one"),
        pytest.param("raise ValueError('of rank one')", 2, "train: of rank one", marks=pytest.mark.slow),
        pytest.param(KILLED, 1, "a worker was ended by signal 9; ", marks=pytest.mark.slow),
    ],
)
def test_a_worker_fails(
    fails: str,
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shows the cause, but not its consequences: lost connections, the launcher's error."""
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(FAILS.format(fails=fails))
    assert main(["train", "fails.py:Fails", "--per-node", "2", "--device", "cpu", "--out", "run"]) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("Traceback") == ("ZeroDivisionError" in fails)
    assert not on_hosts(os.getpid())


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], pytest.param([signal.SIGINT, signal.SIGTERM], marks=pytest.mark.slow)]
)
def test_stopped_workers_save(signals: list[int], tmp_path: Path) -> None:
    """Ctrl-C or SIGTERM: a checkpoint, no process left, and the same command resumes."""
    words = ["train", "digits:mlp,width=4", "--epochs", "10000", "--device", "cpu", "--per-node", "2"]
    command = [sys.executable, "-m", "pufferfish", *words, "--out", "run"]
    done = 0
    for number in signals:
        job = subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)  # fmt: skip
        assert job.stderr is not None
        try:
            if done:
                assert job.stderr.readline() == f"resumed after update {done} of 200000\n"
            first = job.stderr.readline()
            job.send_signal(number)
            output, errors = job.communicate(timeout=150)
        finally:
            job.kill()
        assert job.returncode == 130
        assert not output
        assert int(first.removeprefix("epoch ").split("/")[0]) == done // 20 + 1
        message = errors.splitlines()[-1]
        assert message.endswith("checkpoint saved; rerun the same command to resume")
        assert "Traceback" not in errors
        done = int(message.split()[2])
        assert not on_hosts(job.pid)
    assert done // 20 == len(values(read_run(tmp_path / "run"), "valid/accuracy"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_on_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The measured link is shown and recorded; workers are not started in the folder of another run."""
    if reason := unavailable_reason():
        pytest.skip(f"no emulated network: {reason}")
    words = [*SMALL, "--network", "100mbit", "--nodes", "2", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith("dense: test accuracy")
    assert said.err.startswith("link: requested 100mbit, measured ")
    run = read_run(tmp_path / "run")
    assert (run.hosts, run.workers) == (2, 2)
    assert run.link is not None
    assert run.link["asked"] == "100mbit"
    assert 50 < run.link["got_mbit"] < 101
    assert main([*words, "--lr", "0.3"]) == 2
    assert capsys.readouterr().err == (
        f"pufferfish train: {tmp_path / 'run'}: it holds a run with lr 0.1, not 0.3; choose another --out\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hosts_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message says that their link is not shaped."""
    assert main([*SMALL, "--nodes", "2", "--out", str(tmp_path / "run")]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("the hosts share the unshaped loopback; use --network")


def test_without_a_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system allows none, the loopback is used, with a message."""
    launcher, used = importlib.import_module("pufferfish.lab.train.workers"), []
    monkeypatch.setattr(launcher, "unavailable_reason", lambda: "no rights here")
    monkeypatch.setattr(Hosts, "launch", lambda self, *_, **__: used.append(self) or 0)
    assert launcher.launch_workers(["x.py"], network="1gbit", hosts=1, per_host=2) == 0
    assert [type(hosts) for hosts in used] == [Hosts]
    assert capsys.readouterr().err == "network 1gbit: no rights here. Using the unshaped loopback instead\n"
