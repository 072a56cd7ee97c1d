"""Training through the switch on a CUDA device: decay at the right loss scale, checkpoints, averages, previews."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_frobenius_decay_at_the_right_loss_scale(kind: str, fused: bool) -> None:
    """A scaler's fp32 run equals one without a scaler; a step with an infinity changes nothing."""

    def run(scaled: bool) -> nn.Module:
        model = build().eval()  # no dropout
        made: dict[str, Any] = {"SGD": {"momentum": 0.9}, "AdamW": {}}[kind]
        optimizer = getattr(torch.optim, kind)(
            model.parameters(), lr=0.01, weight_decay=0.1, fused=fused, **made
        )
        pf.FrobeniusDecay(model, optimizer, 0.1)
        pf.factorize_(model, pf.plan(model, 0.25), optimizer)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=scaled)
        for step in range(6):
            x, y = batch(step)
            loss = F.cross_entropy(model(x), y)
            if step == 3:
                if not scaled:
                    continue
                before = [p.detach().clone() for p in model.parameters()]
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 3:
                assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        return model

    for p, q in zip(run(True).parameters(), run(False).parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


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


def test_averages_previews_and_rates() -> None:
    model = build()
    ema = AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    x, y = batch(99)
    switch = pf.Switch(
        rank=0.25, when=pf.AtStep(3), back=pf.AtStep(6), lr=0.5,
        evaluate=lambda m: F.cross_entropy(m(x), y),
    )  # fmt: skip
    state = torch.cuda.get_rng_state()
    shown = switch.preview(model, lambda m: F.cross_entropy(m(x), y), ranks=[0.1, 0.4])
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert len(shown.rows) == 2
    guard = pf.FiniteGuard(model)
    for step in range(8):
        switch.step(model, optimizer, step=step, also=[ema])
        a, b = batch(step)
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        assert guard(loss)
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    assert switch.report is not None
    assert switch.report.loss is not None
    assert torch.isfinite(ema(x)).all()
