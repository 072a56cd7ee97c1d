"""The advisor in real jobs: on emulated hosts, and with several workers on each of several machines."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from on_hosts import on_hosts

import pufferfish as pf
from processes import in_processes
from pufferfish.lab.advise import advisor, load_workload
from pufferfish.lab.advise.advice import in_hierarchy
from pufferfish.lab.advise.advisor import build_timed_model
from pufferfish.lab.advise.run_advise import AdviseSettings, run_advise
from pufferfish.lab.method_name import training_method
from pufferfish.lab.network import unavailable_reason
from pufferfish.lab.train import timing

REASON = unavailable_reason()
FILE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))

def example():
    return torch.randn(4, 32), torch.zeros(4)

def loss(output, target):
    return output.square().mean()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(REASON is not None, reason=f"networks cannot be emulated: {REASON}")
def test_the_best_are_run_on_emulated_hosts(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    run_advise(
        AdviseSettings(task=file, network="20mbit", nodes=2, methods=["bf16"], check=True, out=out, json=True)
    )
    text = capsys.readouterr().out
    advice = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert advice["network"] == "20mbit"
    assert not advice["link"]["extrapolated"]
    assert 12 < 8e-6 / advice["link"]["collectives"]["all_reduce"]["beta"] < 24
    measured = {c["name"]: c["measured"] for c in advice["choices"]}
    assert set(measured) == {"dense", "bf16", "pufferfish", "pufferfish+bf16"}
    run = {name for name, x in measured.items() if x is not None}
    assert "dense" in run
    assert len(run) >= 3
    assert all(training_method(name).warm_up in run for name in run)
    assert measured[advice["best"]] < measured["dense"]  # by 4 times fewer bytes on a slow line
    assert pf.Plan.load(out).ranks
    assert not on_hosts(os.getpid())


def command_in_a_job(rank: int, size: int, file: str, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    advisor._MAX_STEPS, timing.MAX_STEPS = 5, 2
    module: Any = sys.modules["pufferfish.lab.advise.advisor"]
    module.MIN_ROUNDS = module.MAX_ROUNDS = 3
    settings = AdviseSettings(task=file, network="real", methods=["bf16"], check=True, out=out, json=True)
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        run_advise(settings)
    if rank > 0:
        assert not stdout.getvalue()
        return
    advice = json.loads(stdout.getvalue())
    assert (advice["nodes"], advice["per_node"]) == (2, 2)
    assert advice["link"]["intra_node"] is not None
    estimates = {e["name"]: e for e in advice["choices"]}
    flat = {name for name in estimates if "hierarchy" not in name}
    assert flat >= {"dense", "bf16"}
    assert estimates.keys() - flat == {in_hierarchy(name) for name in flat}
    run = {name for name, e in estimates.items() if e["measured"] is not None}
    assert {"dense", advice["best"]} <= run
    assert all(training_method(name).warm_up in run for name in run)
    assert out.exists() == ("pufferfish" in advice["best"])


def steps_in_a_hierarchy(rank: int, size: int, file: str, out: Path) -> None:
    """Plain averages are hierarchical too."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    workload = load_workload(file)
    plan = pf.plan(workload.build(), 0.25)
    for name in ("dense", "bf16", "pufferfish", "pufferfish+bf16"):
        model = build_timed_model(workload, training_method(in_hierarchy(name)), plan)
        model.step()
        counts = plan.after if "pufferfish" in name else plan.before
        assert sum(p.numel() for p in model.inner.parameters()) == counts.parameters
        assert model.hook is not None
        assert model.hook.meter.collective_bytes["broadcast"] >= counts.gradient_bytes


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "case", [pytest.param(command_in_a_job, marks=pytest.mark.slow), steps_in_a_hierarchy]
)
def test_two_machines_with_two_workers_each(case: Callable[..., None], file: str, tmp_path: Path) -> None:
    in_processes(case, 4, file, tmp_path / "plan.json")
