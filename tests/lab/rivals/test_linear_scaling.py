"""Linear scaling: the rate of every update against the one worked out by hand."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

from pufferfish.lab.rivals import SAM, linear_scaling

After = Callable[[Optimizer], LRScheduler]


def optimizer(tensor: bool = False) -> SGD:
    rate: float | torch.Tensor = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
    return SGD([{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.02}], lr=rate)  # fmt: skip


def rates(made: Optimizer, scheduler: LRScheduler, steps: int) -> list[list[float]]:
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Detected call of")
        for _ in range(steps):
            found.append([float(group["lr"]) for group in made.param_groups])
            made.step(lambda: sum(p.sum() for group in made.param_groups for p in group["params"]).backward())
            scheduler.step()
    return found


def cosine(made: Optimizer) -> LRScheduler:
    return CosineAnnealingLR(made, 10)


def steps(made: Optimizer) -> LRScheduler:
    return MultiStepLR(made, [2, 4], 0.1)


@pytest.mark.parametrize("warm_up", [0, 1, 5])
@pytest.mark.parametrize("batch", [2048, 256, 64])
@pytest.mark.parametrize(
    ("after", "factor"),
    [
        (None, lambda t: 1.0),
        (cosine, lambda t: (1 + math.cos(math.pi * t / 10)) / 2),
        (steps, lambda t: 0.1 ** sum(t >= m for m in (2, 4))),
    ],
)
def test_every_rate(warm_up: int, batch: int, after: After | None, factor: Callable[[int], float]) -> None:
    made, k = optimizer(), batch / 256
    scheduler = linear_scaling(made, base_batch=256, batch=batch, warm_up=warm_up, after=after)
    for t, found in enumerate(rates(made, scheduler, 12)):
        if t < warm_up:
            wanted = 1 + (k - 1) * t / warm_up
        else:
            wanted = k * factor(t - warm_up)
        assert found == pytest.approx([0.1 * wanted, 0.02 * wanted], abs=1e-12), t


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    made = optimizer(tensor=True)
    rate = made.param_groups[0]["lr"]
    scheduler = linear_scaling(made, base_batch=1, batch=4, warm_up=3, after=cosine)
    plain = optimizer()
    same = linear_scaling(plain, base_batch=1, batch=4, warm_up=3, after=cosine)
    assert rates(made, scheduler, 8) == [pytest.approx(x) for x in rates(plain, same, 8)]
    assert made.param_groups[0]["lr"] is rate


def test_groups_that_share_a_tensor() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    made = SGD(groups, lr=torch.tensor(0.1, dtype=torch.float64))
    scheduler = linear_scaling(made, base_batch=1, batch=4, warm_up=3, after=steps)
    wanted = [0.1, 0.2, 0.3, 0.4, 0.4, 0.04]
    assert rates(made, scheduler, 6) == [pytest.approx([rate, rate]) for rate in wanted]


def test_of_sam() -> None:
    plain = optimizer()
    sam = SAM(optimizer(), nn.Module())
    settings = {"base_batch": 1, "batch": 4, "warm_up": 3}
    expected = rates(plain, linear_scaling(plain, **settings), 5)
    assert rates(sam, linear_scaling(sam, **settings), 5) == expected


@pytest.mark.parametrize("stop", [2, 3, 6])
def test_goes_on_from_saved_state(stop: int) -> None:
    def start() -> tuple[SGD, LRScheduler]:
        made = optimizer()
        return made, linear_scaling(made, base_batch=1, batch=4, warm_up=3, after=cosine)

    through = rates(*start(), 10)
    made, scheduler = start()
    first = rates(made, scheduler, stop)
    saved = copy.deepcopy((made.state_dict(), scheduler.state_dict()))
    made, scheduler = start()
    made.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    assert first + rates(made, scheduler, 10 - stop) == through


def test_bad_settings_change_nothing() -> None:
    made = optimizer()
    with pytest.raises(ValueError, match="batch=0"):
        linear_scaling(made, base_batch=256, batch=0, warm_up=1)
    with pytest.raises(ValueError, match="warm_up=-1"):
        linear_scaling(made, base_batch=256, batch=256, warm_up=-1)
    cosine(made)
    with pytest.raises(ValueError, match="after="):
        linear_scaling(made, base_batch=256, batch=512, warm_up=1)
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.02]
