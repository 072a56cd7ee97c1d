"""The README's code runs as it stands there, and its figures are those of the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.cli import main

README = Path(__file__).parents[1] / "README.md"
if not README.exists():
    pytest.skip("README.md is not beside the tests", allow_module_level=True)
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


def quick_start() -> str:
    """The code after the diff of the switch."""
    _, diff = blocks("diff")
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 6
    return "\n".join(line[1:] for line in diff.splitlines())


def build_ddp() -> nn.Module:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))


def runs_under_ddp(rank: int, size: int) -> None:
    x, y = torch.randn(8, 64)[rank::size], (torch.arange(8) % 4)[rank::size]
    user: dict[str, Any] = {
        "build_model": build_ddp,
        "loss": nn.functional.cross_entropy,
        "batches": lambda: [(x, y)] * 2,
        "epochs": 3,
    }
    automatic, count = re.subn(r"pf\.Switch\(.*(?=  #)", "pf.Switch()", quick_start())
    assert count == 1
    for code in (quick_start(), automatic):
        exec(code, user)
        ddp = user["model"]
        assert user["switch"].report is not None
        assert isinstance(ddp, DDP)
        assert all(type(layer) in (nn.Linear, nn.ReLU) for layer in ddp.module)
        for p in ddp.parameters():
            assert same_everywhere(p)


def compresses(rank: int, size: int) -> None:
    first, _ = blocks("diff")
    user: dict[str, Any] = {"DistributedDataParallel": DDP, "model": build_ddp().module}
    user["optimizer"] = torch.optim.AdamW(user["model"].parameters())
    exec("\n".join(line[1:] for line in first.splitlines()), user)
    user["ddp"](torch.ones(2, 64)).sum().backward()
    assert user["hook"].meter.steps == 1


def test_compression_under_ddp() -> None:
    in_processes(compresses, 2)


def test_the_quick_start_under_ddp() -> None:
    in_processes(runs_under_ddp, 2)


def test_the_quick_start() -> None:
    x = torch.randn(8, 64)

    def build_model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    user: dict[str, Any] = {
        "build_model": build_model,
        "loss": nn.functional.cross_entropy,
        "batches": lambda: [(x, torch.arange(8) % 4)] * 2,
        "epochs": 3,
    }
    exec(quick_start(), user)
    assert isinstance(user["model"], nn.Sequential)
    assert user["switch"].report.plan.ranks == {"0": {"": 16}, "2": {"": 16}}
    assert all(type(layer) in (nn.Linear, nn.ReLU) for layer in user["model"])


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {pf.__version__}\n" in (README.parent / "CHANGELOG.md").read_text()


def test_the_extensions_of_the_contributors_guide() -> None:
    text = (README.parent / "CONTRIBUTING.md").read_text()
    guide: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(snippet, guide)
    layer, rule = guide["ScaledLinear"], guide["Share"]
    model = nn.Sequential(layer(64, 64))
    x = torch.randn(2, 64)
    pf.factorize_(model, pf.plan(model, rule(3, multiple=1)))
    low_rank = model(x)
    assert model[0].ranks == {"": 21}
    pf.merge_(model)
    assert type(model[0]) is layer
    torch.testing.assert_close(model(x), low_rank)
    assert pf.Plan.from_json(pf.plan(model, rule(3)).to_json())
