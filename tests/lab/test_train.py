"""The loop, as the command runs it: alone, under torchrun, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pufferfish.cli import main
from pufferfish.compress import BFloat16, PowerSGD
from pufferfish.lab.choice import choice
from pufferfish.lab.report import report
from pufferfish.measure import Run, read

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "pufferfish",
]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def losses(run: Run) -> list[tuple[int, float]]:
    return [(step, value) for _, step, value in run.metrics["loss"]]


def test_choices() -> None:
    assert choice("dense").compress is None
    assert choice("bf16").compress == BFloat16()
    assert choice("pufferfish+PowerSGD(rank=2)").compress == PowerSGD(2)
    for text, told in (
        ("auto+", "follows the"),
        ("dens", "there is no dens"),
        ("dense+nothing", "there is no nothing"),
    ):
        with pytest.raises(ValueError, match=told):
            choice(text)


def test_alone_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("dense", "pufferfish"):
        out = tmp_path / method
        words = [
            "train",
            "digits:mlp,width=16",
            "--epochs",
            "3",
            "--method",
            method,
            "--out",
            str(out),
            "--device",
            "cpu",
        ]
        assert main(words) == 0
        assert f"{method}: accuracy" in capsys.readouterr().out
        run = read(out)
        assert run.results["accuracy"] > 60
        assert {
            "loss",
            "lr",
            "bytes",
            "valid/accuracy",
            "time/forward",
            "time/backward",
        } <= run.metrics.keys()
    assert (
        read(tmp_path / "pufferfish").results["parameters"] < read(tmp_path / "dense").results["parameters"]
    )
    assert any(layer["rank"] for layer in read(tmp_path / "pufferfish").layers)
    assert (
        main(["train", "digits:mlp,width=16", "--epochs", "3", "--out", str(tmp_path / "dense")]) == 0
    )  # it is done
    page = report([tmp_path])
    assert "pufferfish" in page
    assert "accuracy" in page


@pytest.mark.timeout(200)
def test_killed_workers_go_on(tmp_path: Path) -> None:
    """With a switch and compression: the losses of a run that was killed are those of one that was not."""
    words = ["train", "digits:mlp,width=16", "--epochs", "6", "--method", "pufferfish", "--compress", "powersgd-2",
             "--save-every", "7", "--device", "cpu"]  # fmt: skip
    command = [*TORCHRUN, *words, "--out"]
    subprocess.run([*command, "straight"], cwd=tmp_path, env=ENV, check=True, capture_output=True, timeout=90)
    killed = subprocess.Popen([*command, "killed"], cwd=tmp_path, env=ENV, start_new_session=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        while not list(tmp_path.glob("killed/checkpoints/*-step-*")):
            assert killed.poll() is None
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert read(tmp_path / "killed").finished is None
    subprocess.run([*command, "killed"], cwd=tmp_path, env=ENV, check=True, capture_output=True, timeout=90)
    straight, again = (read(tmp_path / name) for name in ("straight", "killed"))
    assert losses(again) == losses(straight)
    assert again.results == straight.results
    assert again.metrics["bytes"][-1][2] == straight.metrics["bytes"][-1][2] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digit"], "did you mean digits"),
        (["digits", "--method", "puffer"], "there is no puffer"),
        (["digits", "--recipe", "long"], "it has short"),
        (["digits", "--batch", "0"], "batch=0"),
        (["digits", "--batch", "10000"], "training images"),
        (["cifar10", "--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
