"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pufferfish as pf
from pufferfish.cli import main

README = Path(__file__).parents[1] / "README.md"


GUIDE = README.parent / "docs" / "lab.md"


def blocks(kind: str, file: Path = README) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", file.read_text(), re.DOTALL)


def test_the_labs_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(64, 4)
    user: dict[str, Any] = {
        "pf": pf,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": nn.functional.cross_entropy,
        "x": torch.randn(8, 64),
        "y": torch.arange(8) % 4,
    }
    for snippet in blocks("python", GUIDE):
        exec(snippet, user)
    assert main(["report", "runs/mine"]) == 0
    assert "93.1" in (tmp_path / "report.html").read_text()
    assert (GUIDE.parent / "report.png").is_file()


def test_the_quick_start_and_the_snippets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(8, 64)

    def build_model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    user: dict[str, Any] = {
        "build_model": build_model,
        "loss": nn.functional.cross_entropy,
        "batches": lambda: [(x, torch.arange(8) % 4)] * 2,
        "epochs": 3,
        "warm_up": 1,
        "x": x,
        "y": torch.arange(8) % 4,
        "held_loss": lambda m: nn.functional.cross_entropy(m(x), torch.arange(8) % 4),
        "steps": 100,
    }
    (diff,) = blocks("diff")
    added = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(added) <= 6
    exec("\n".join(line[1:] for line in diff.splitlines()), user)
    model = user["model"]
    assert isinstance(model, nn.Sequential)
    assert user["switch"].report.plan["0"].reason == "kept by pattern '0'"
    assert user["switch"].report.plan["2"].rank == 16
    assert all(type(layer) in (nn.Linear, nn.ReLU) for layer in model)
    for snippet in blocks("python"):
        model = user["model"] = build_model()
        optimizer = user["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
        user["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        exec(snippet, user)
        if "checkpoint" in user:
            user.pop("checkpoint").close()
            assert len(list((tmp_path / "runs" / "a").iterdir())) == 1
    assert (tmp_path / "small" / "model.safetensors").is_file()
    torch.testing.assert_close(user["own"](x), user["fresh"](x))


def test_the_claim_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["resnet18", "vgg19", "resnet50", "wide_resnet50_2", "lstm", "transformer"]
    rows = re.findall(
        r"^\| .*? \| ([\d,]+) \| ([\d,]+) \| (\S+)× fewer \| (\S+)× fewer \|$", README.read_text(), re.M
    )
    assert len(rows) == len(names)
    for name, row in zip(names, rows, strict=True):
        main(["plan", name])
        lines = capsys.readouterr().out.splitlines()
        parameters, macs, gradient = (
            next(line for line in lines if line.startswith(start)).split()
            for start in ("parameters", "MACs forward", "gradient bytes")
        )
        assert parameters[1:3] == list(row[:2])
        assert gradient[-2] == f"{row[2]}×"
        assert macs[-2] == f"{row[3]}×"


def test_the_extensions_of_the_contributors_guide() -> None:
    text = (README.parent / "CONTRIBUTING.md").read_text()
    guide: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(snippet, guide)
    layer, rule = guide["ScaledLinear"], guide["Share"]
    model = nn.Sequential(layer(64, 64))
    x = torch.randn(2, 64)
    pf.factorize_(model, pf.plan(model, rule(3), multiple=1))
    low_rank = model(x)
    assert model[0].ranks == {"": 21}
    pf.merge_(model)
    assert type(model[0]) is layer
    torch.testing.assert_close(model(x), low_rank)
    assert pf.Plan.from_json(pf.plan(model, rule(3)).to_json())
