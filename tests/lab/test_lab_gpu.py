"""The program's commands on a GPU: what they show, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pufferfish.cli import main

pytestmark = pytest.mark.gpu

TASK = "digits:cnn"
ON = ["--device", "cuda"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_advice(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", TASK, *ON, "--precision", precision, "--network", "1gbit", "--nodes", "4", "--json"]
    assert main([*words, "--methods", "bf16,powersgd(4)"]) == 0
    said = json.loads(capsys.readouterr().out)
    names = {c["name"] for c in said["choices"]}
    assert names >= {"dense", "bf16", "powersgd(4)"}
    assert all(c["step"] > 0 for c in said["choices"])
    assert said["computing"]["backward"] > 0


@pytest.mark.parametrize("more", [[], ["--compile"], ["--per-node", "4", "--simulate", "--network", "1gbit"]])
def test_a_bench(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", TASK, *ON, "--epochs", "3", "--rounds", "2", "--out", str(tmp_path), *more]
    assert main([*words, "--methods", "pufferfish"]) == 0
    shown = capsys.readouterr().out
    assert "pufferfish" in shown
    assert torch.cuda.get_device_name() in shown
    assert ("predicted" in shown) == ("--simulate" in more)
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("command", ["train", "bench"])
def test_more_workers_than_gpus(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([command, TASK, *ON, "--batch", "64", "--per-node", "64", "--out", str(out)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"pufferfish {command}: 64 workers on {torch.cuda.device_count()} GPU")
    assert len(said.splitlines()) == 1
    assert not out.exists()
