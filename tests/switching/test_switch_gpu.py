"""Checkpoints of a run through the switch on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf

pytestmark = pytest.mark.gpu


def build() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)
        )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(32, 64, device="cuda", generator=generator)
    return x, torch.randint(4, (32,), device="cuda", generator=generator)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stop", [2, 5])
def test_resuming_equals_not_stopping(stop: int, tmp_path: Path) -> None:
    """Dropout draws from the device's random numbers; a fused AdamW keeps its step count there."""
    torch.use_deterministic_algorithms(True, warn_only=True)

    def run(folder: Path, steps: int) -> nn.Module:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        switch = pf.Switch(rank=0.25, when=pf.AtStep(4))
        with pf.Checkpoint(folder, model, optimizer, switch=switch, every=1) as checkpoint:
            at = checkpoint.resume()
            for step in range(at.position["step"] if at else 0, steps):
                switch.step(model, optimizer, step=step)
                update(model, optimizer, step)
                checkpoint.step(step=step + 1)
        return model

    try:
        straight = run(tmp_path / "a", 8)
        run(tmp_path / "b", stop)
        torch.cuda.manual_seed(99)
        resumed = run(tmp_path / "b", 8)
    finally:
        torch.use_deterministic_algorithms(False)
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
