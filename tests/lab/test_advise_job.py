"""The advisor in real jobs: on emulated hosts, and of several workers on each of several machines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import pufferfish as pf
from processes import in_processes
from pufferfish.lab.advise import subject
from pufferfish.lab.advise.command import Asked, run
from pufferfish.lab.advise.ways import full_rank, named, way
from pufferfish.lab.network import Loopback, clean, why_not

WHY_NOT = why_not()
FACTORY = """
import torch
from torch import nn

def wide():
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    return model, torch.randn(4, 32), lambda model, x: model(x).square().mean()
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FACTORY)
    return f"{tmp_path / 'mine.py'}:wide"


@pytest.mark.timeout(180)
@pytest.mark.skipif(WHY_NOT is not None, reason=f"networks cannot be emulated: {WHY_NOT}")
def test_the_best_are_run_on_emulated_hosts(
    factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    run(Asked(task=factory, network="20mbit", nodes=2, methods=["bf16"], check=True, out=out, json=True))
    text = capsys.readouterr().out
    said = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert said["network"] == "20mbit"
    assert not said["link"]["extrapolated"]
    assert 12 < 8e-6 / said["link"]["lines"]["all_reduce"]["beta"] < 24
    measured = {c["name"]: c["measured"] for c in said["choices"]}
    assert set(measured) == {"dense", "bf16", "pufferfish", "pufferfish+bf16"}
    clocked = {name for name, x in measured.items() if x is not None}
    assert "dense" in clocked
    assert len(clocked) >= 3
    assert all(full_rank(name) in clocked for name in clocked)
    assert measured[said["best"]] < measured["dense"]  # by 4 times fewer bytes on a slow line
    assert pf.Plan.load(out).ranks
    assert not clean()


@pytest.mark.timeout(180)
def test_a_job_of_two_machines_with_two_workers_each(factory: str, tmp_path: Path) -> None:
    asked = {"task": factory, "network": "real", "methods": ["bf16"], "json": True}
    said: list[str] = []
    with Loopback(2) as hosts:
        command = ["-m", "pufferfish.lab.advise.command", json.dumps({**_defaults(), **asked})]
        assert hosts.launch(command, per_host=2, write=said.append) == 0, "\n".join(said)
    text = "\n".join(line.partition(" | ")[2] for line in said if line.startswith("host0"))
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert (found["nodes"], found["per_node"]) == (2, 2)
    assert found["link"]["inside"] is not None
    assert found["link"]["toll"] >= 0
    names = {c["name"] for c in found["choices"]}
    flat = {name for name in names if "levels" not in name}
    assert flat >= {"dense", "bf16"}
    assert names - flat == {f"{name}, levels=node" for name in flat}
    assert all(c["step"] > 0 for c in found["choices"])


def on_two_levels(rank: int, size: int, factory: str) -> None:
    """Plain averages too go inside a machine first."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    about = subject(factory)
    made = pf.plan(about.build(), 0.25)
    for name in ("dense", "bf16", "pufferfish", "pufferfish+bf16"):
        chosen, levels = named(f"{name}, levels=node")
        one = way(about, chosen, made, levels)
        one.step()
        counts = made.after if "pufferfish" in name else made.before
        assert sum(p.numel() for p in one.bare.parameters()) == counts.parameters
        assert one.hook is not None
        assert one.hook.meter.handed["reduce_scatter"] >= counts.gradient_bytes


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_way_runs_on_two_levels(factory: str, tmp_path: Path) -> None:
    in_processes(on_two_levels, 4, factory)


def _defaults() -> dict[str, None]:
    return {"data": None, "out": None}
