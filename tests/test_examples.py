"""The examples as a user runs them, with small settings."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import as_torchrun, forked, free_port
from pufferfish import Checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run an example in this process and return its output."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *args: str, **settings: object) -> str:
        for key, value in settings.items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setattr(sys, "argv", [name, *args])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def run_as_torchrun(
    folder: Path,
    workers: int,
    name: str,
    *args: str,
    stop_at: int | None = None,
    stop_by: signal.Signals = signal.SIGTERM,
) -> str:
    """Run an example in forked workers with the environment of torchrun, and return the output of all.

    Args:
        stop_at: the last worker sends itself `stop_by` after this many updates.
    """
    forked(_torchrun_worker, workers, (workers, free_port(), folder, name, args, stop_at, stop_by), name=name)
    return "".join((folder / f"output-{rank}").read_text() for rank in range(workers))


def _torchrun_worker(
    rank: int,
    size: int,
    port: int,
    folder: Path,
    name: str,
    args: tuple[str, ...],
    stop_at: int | None,
    stop_by: signal.Signals,
) -> None:
    as_torchrun(rank, size, port)
    os.chdir(folder)
    sys.argv = [name, *args]
    real_step = Checkpoint.step

    def step(self: Checkpoint, *, step: int, **position: Any) -> bool:
        if rank == size - 1 and step == stop_at:
            os.kill(os.getpid(), stop_by)
        return real_step(self, step=step, **position)

    Checkpoint.step = step  # type: ignore[assignment, method-assign]
    with open(f"output-{rank}", "w") as output, contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def accuracies(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"test accuracy ([\d.]+)%", output)]


def losses(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", output)]


@pytest.mark.parametrize(
    ("name", "epochs"), [("own_loop", 5), ("ema_and_clipping", 10), ("two_optimizers", 10)]
)
def test_trains_through_the_switch(name: str, epochs: int, run: Callable[..., str]) -> None:
    output = run(f"{name}.py", EPOCHS=epochs)
    assert "Switched to low rank" in output
    assert accuracies(output)
    assert min(accuracies(output)) >= 95, output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_multi_node(tmp_path: Path) -> None:
    """Two torchrun launchers that meet over TCP, as on two machines."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    nodes = []
    head = f"127.0.0.1:{free_port()}"
    for _ in range(2):
        nodes.append(
            subprocess.Popen(
                [EXAMPLES / "multi_node.sh", "2", head, EXAMPLES / "own_loop.py"],
                cwd=tmp_path,
                text=True,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": search, "EPOCHS": "4"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sum(text.count("Switched to low rank") for text in outputs) == 1  # printed by rank 0
    first, second = (x for text in outputs for x in accuracies(text))
    assert first == second


def test_local_steps(tmp_path: Path) -> None:
    output = run_as_torchrun(tmp_path, 2, "local_steps.py")
    assert len(accuracies(output)) == 2
    assert min(accuracies(output)) >= 95, output
    sent, ddp = (int(x.replace(",", "")) for x in re.findall(r"[\d,]{4,}", output))
    assert sent * 70 < ddp  # a quarter of the bits, once in 20 steps, and small control messages


def test_compressed_gradients(tmp_path: Path) -> None:
    output = run_as_torchrun(tmp_path, 2, "compressed.py", "runs")
    assert accuracies(output)[0] >= 95, output
    assert "31.6 times fewer bytes" in output


def test_fsdp2(tmp_path: Path) -> None:
    output = run_as_torchrun(tmp_path, 2, "fsdp2.py")
    assert len(losses(output)) == 6
    assert losses(output)[-1] < 0.8 * losses(output)[0]
    assert "Switched to low rank at epoch 2" in output


@pytest.mark.slow
def test_fsdp2_with_compression(tmp_path: Path) -> None:
    output = run_as_torchrun(tmp_path, 4, "fsdp2_compressed.py")
    assert losses(output)[-1] < 0.2 * losses(output)[0], output
    assert "3.92 times fewer bytes" in output


def test_resumable(tmp_path: Path) -> None:
    """A run stopped by SIGTERM and resumed ends like an uninterrupted one."""
    uninterrupted = run_as_torchrun(tmp_path, 2, "resumable.py", "uninterrupted")
    assert accuracies(uninterrupted)[0] >= 95, uninterrupted
    assert run_as_torchrun(tmp_path, 2, "resumable.py", "stopped", stop_at=30) == ""
    assert run_as_torchrun(tmp_path, 2, "resumable.py", "stopped") == uninterrupted


def test_own_checkpoint(run: Callable[..., str]) -> None:
    """Interrupted before and after the switch at epoch 3."""
    uninterrupted = run("own_checkpoint.py", EPOCHS=6, FILE="uninterrupted.pt")
    for stop in (2, 4, 6):
        resumed = run("own_checkpoint.py", EPOCHS=stop, FILE="resumed.pt")
    assert resumed == uninterrupted


def test_hugging_face(tmp_path: Path, run: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    stages = dict(re.findall(r"(trained|loaded|merged): (.*)", run("hugging_face.py")))
    assert stages == dict.fromkeys(
        ("trained", "loaded", "merged"), "The quick brown fox jumps over the lazy dog."
    )
    assert (tmp_path / "low-rank" / "pufferfish.safetensors").is_file()
    assert (tmp_path / "low-rank" / "tokenizer_config.json").is_file()


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda p: p.name)
def test_shell_scripts_are_well_formed(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
