"""The learning rate after the switch, under schedules that compute from the last rate and from the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import pufferfish as pf
from pufferfish.switching.scaled_rate import ScaledRate

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "from the first rate": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "from the last rate": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "none": lambda o: None,
}


def rates(lr: float, schedule: str, tensor: bool = False, stop: int | None = None) -> list[float]:
    """The rate that each update really used: all gradients are 1, so it is the distance moved.

    With `stop`, everything is saved there and loaded into fresh objects.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, pf.Switch]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
        start = torch.tensor(1.0) if tensor else 1.0
        optimizer = torch.optim.SGD(model.parameters(), lr=start, foreach=False)
        return model, optimizer, SCHEDULES[schedule](optimizer), pf.Switch(rank=8, when=pf.AtStep(2), lr=lr)

    model, optimizer, scheduler, switch = build()
    found = []
    for step in range(6):
        if step == stop:
            state = optimizer.state_dict(), scheduler and scheduler.state_dict(), switch.state_dict()
            model, optimizer, scheduler, switch = build()
            for _ in range(2):  # twice scales once
                switch.restore_(model, optimizer, state[2])
            model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
            optimizer.load_state_dict(state[0])
            if scheduler:
                scheduler.load_state_dict(state[1])
        switch.step(model, optimizer, step=step)
        bias = model[1].get_parameter("bias").detach()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = float(bias)
        optimizer.step()
        optimizer.zero_grad()
        found.append(before - float(bias))
        if scheduler:
            scheduler.step()
    return found


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scaled_from_the_switch_on(schedule: str, tensor: bool) -> None:
    decay = 1.0 if schedule == "none" else 0.9
    expected = [decay**step * (0.5 if step >= 2 else 1.0) for step in range(6)]
    assert rates(0.5, schedule, tensor) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stop", [1, 4])
def test_scaled_after_a_resume(stop: int) -> None:
    assert rates(0.5, "from the first rate", stop=stop) == pytest.approx(rates(0.5, "from the first rate"))


@pytest.mark.parametrize("tensor", [False, True])
def test_a_step_that_raises_leaves_the_rate_of_the_schedule(tensor: bool) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(1.0) if tensor else 1.0, foreach=False)
    ScaledRate(optimizer, 0.5)

    def fails() -> float:
        raise RuntimeError("no data")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="no data"):
            optimizer.step(fails)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert float(optimizer.param_groups[0]["lr"]) == 1.0
    assert float(parameter) == -0.5
