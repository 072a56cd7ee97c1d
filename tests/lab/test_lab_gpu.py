"""The program's commands on a GPU: what they show, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pufferfish.cli import main
from pufferfish.measure import read_run

pytestmark = pytest.mark.gpu

TASK = "digits:cnn"
ON = ["--device", "cuda"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_advice(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", TASK, *ON, "--precision", precision, "--network", "1gbit", "--nodes", "4", "--json"]
    assert main([*words, "--methods", "bf16,powersgd-4"]) == 0
    said = json.loads(capsys.readouterr().out)
    names = {c["name"] for c in said["choices"]}
    assert names >= {"dense", "bf16", "powersgd-4"}
    assert all(c["step"] > 0 for c in said["choices"])
    assert said["computing"]["backward"] > 0


@pytest.mark.parametrize(
    "more", [["--mode", "auto"], ["--mode", "eager"], ["--workers", "4", "--simulate", "--network", "1gbit"]]
)
def test_a_bench(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", TASK, *ON, "--epochs", "3", "--rounds", "2", "--out", str(tmp_path), *more]
    assert main([*words, "--methods", "pufferfish"]) == 0
    shown = capsys.readouterr().out
    assert "pufferfish" in shown
    assert torch.cuda.get_device_name() in shown
    assert ("predicted" in shown) == ("--simulate" in more)
    assert (tmp_path / "report.html").exists()
    expected = "eager" if "eager" in more else "graph"
    assert json.loads((tmp_path / "bench.json").read_text())["mode"] == expected


@pytest.mark.parametrize("mode", ["auto", "eager", "graph"])
def test_a_narrower_model_of_the_same_time(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", TASK, *ON, "--epochs", "2", "--out", str(tmp_path), "--mode", mode]
    assert main([*words, "--method", "narrow@time"]) == 0
    assert "× as long as the low-rank model's" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "bench"])
def test_more_workers_than_gpus(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([command, TASK, *ON, "--batch", "64", "--workers", "64", "--out", str(out)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"pufferfish {command}: 64 workers on {torch.cuda.device_count()} GPU")
    assert len(said.splitlines()) == 1
    assert not out.exists()


def test_simulated_local_steps_in_a_graph(tmp_path: Path) -> None:
    """Each of the workers has a graph of its own, which averages and the switch do not break."""
    losses = []
    for mode in ("eager", "graph"):
        words = ["train", TASK, *ON, "--precision", "fp32", "--epochs", "3", "--mode", mode]
        more = ["--method", "pufferfish+streaming-4x2", "--workers", "4", "--simulate"]
        assert main([*words, *more, "--out", str(tmp_path / mode)]) == 0
        losses.append([value for _, _, value in read_run(tmp_path / mode).metrics["loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
