"""Local steps with few bits, and with Muon inside (MuLoCo), resumed in real processes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from local_workers import diloco
from torch import nn, optim

import pufferfish as pf
from nested import equal
from processes import in_processes, same_everywhere
from pufferfish.compression import Accordion, Int2, Int4, LoCo, PowerSGD, SparseLoCo
from pufferfish.local.local_steps import LocalSteps

H = 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def muon(model: nn.Module) -> list[optim.Optimizer]:
    """Muon for the inner matrix, AdamW for the first and the last layer and the biases."""
    matrix = model[2].weight
    others = [p for p in model.parameters() if p is not matrix]
    return [optim.Muon([matrix], lr=0.02), optim.AdamW(others, lr=1e-2)]


def update(model: nn.Module, optimizers: list[optim.Optimizer], step: int, worker: int) -> None:
    stream = torch.Generator().manual_seed(100 * step + worker)
    x, y = torch.randn(8, 16, generator=stream), torch.randint(3, (8,), generator=stream)
    nn.functional.cross_entropy(model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(
    local: LocalSteps, model: nn.Module, optimizers: list[optim.Optimizer], steps: range, worker: int
) -> None:
    for step in steps:
        update(model, optimizers, step, worker)
        local.step(model)
    for name, x in model.state_dict().items():
        assert local.updates or same_everywhere(x), name


def resumes_exactly(rank: int, size: int, folder: str) -> None:
    """In the middle of a round, with the state of both inner optimizers."""
    for method, outer in (
        (SparseLoCo(k=4, chunk=64), None), (Int4(64), diloco), (Int2(64), diloco), (LoCo(64), diloco),
        (Accordion(PowerSGD(2), PowerSGD(1), every=1), diloco),
    ):  # fmt: skip
        ends = []
        for stops in ((7,), (3, 7)):
            for stop in stops:
                model = build()
                local, optimizers = LocalSteps(H, outer=outer, method=method), muon(model)
                place = f"{folder}/{type(method).__name__}{len(stops)}"
                with pf.Checkpoint(place, model, optimizers, compressor=local) as checkpoint:
                    at = checkpoint.resume()
                    local.start(model)
                    train(local, model, optimizers, range(at.position["step"] if at else 0, stop), rank)
                    checkpoint.save(step=stop)
            ends.append(copy.deepcopy((model.state_dict(), local.state_dict())))
        equal(ends[0], ends[1])


@pytest.mark.timeout(120)  # the hang guard
def test_resumes_exactly(tmp_path: Path) -> None:
    in_processes(resumes_exactly, 2, str(tmp_path))
