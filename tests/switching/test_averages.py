"""Averaged copies follow the switch in the live model's factors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pufferfish as pf


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=2), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def products(model: nn.Module) -> dict[str, Tensor]:
    return {name: m.product() for name, m in model.named_modules() if isinstance(m, pf.layers.LowRank)}


def test_the_average_of_a_model_that_stood_still_is_that_model() -> None:
    """Where W̄ = W the projection gives back the very factors, in their basis, not in one of its own."""
    live = build()
    average = copy.deepcopy(live)
    pf.Switch(rank=0.25, when=pf.AtEpoch(0)).step(live, None, epoch=0, also=[average])
    for (name, p), q in zip(live.named_parameters(), average.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


class Average(nn.Module):
    """An average as other packages write it: the copy is its child `module`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


def test_any_module_that_holds_a_copy_is_an_average() -> None:
    live, bare = build(), build()
    averages = [Average(live), copy.deepcopy(live)]
    pf.Switch(rank=0.25, when=pf.AtEpoch(0)).step(live, None, epoch=0, also=averages)
    for p, q in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(
        ValueError, match=r"also: ReLU is not a copy of the model: 0: .*; pass the module that has"
    ):
        pf.Switch(rank=0.25, when=pf.AtEpoch(5)).step(bare, None, epoch=0, also=[nn.ReLU()])


def test_close_to_the_best_of_that_rank() -> None:
    """Against the slow way: the average's own truncated SVD, which is the best but in another basis."""
    live = build()
    optimizer = torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9)
    ema = AveragedModel(live, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(10):
        update(live, optimizer, step)
        ema.update_parameters(live)
    dense = copy.deepcopy(ema.module)
    best = copy.deepcopy(dense)
    pf.factorize_(best, pf.plan(best, 0.25))
    switch = pf.Switch(rank=0.25, when=pf.AtStep(10))
    assert switch.step(live, optimizer, step=10, also=[ema])
    for name, W in products(ema.module).items():
        target = dense.get_submodule(name).weight
        error, least = (float((target - x).norm()) for x in (W, products(best)[name]))
        assert error <= 1.05 * least + 1e-5
        # and its factors lie near the live ones, so that averaging them goes on
        mine, theirs = (m.get_submodule(name).up.weight for m in (ema.module, live))
        assert float((mine - theirs).norm()) < 0.2 * float(theirs.norm())
    update(live, optimizer, 10)
    ema.update_parameters(live)
    assert torch.isfinite(ema(torch.randn(2, 3, 8, 8))).all()


def test_an_average_made_during_the_warm_up_can_be_called() -> None:
    model, x = build(), torch.randn(8, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    switch = pf.Switch(rank=0.25, keep=["0"], when=pf.AtStep(2))
    switch.step(model, optimizer, step=0)
    average = AveragedModel(model)  # with copies of the hooks that watch the inputs of layers
    for step in range(3):
        switch.step(model, optimizer, step=step, also=[average])
        update(model, optimizer, step)
        average(x)
    assert not any(m._forward_hooks for m in average.modules())


def test_nothing_changes_if_an_average_is_not_finite() -> None:
    model = build()
    average = copy.deepcopy(model)
    with torch.no_grad():
        average[5].weight[0, 0] = torch.nan
    switch = pf.Switch(rank=0.25, when=pf.AtStep(0), keep=["0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match="5: the weight contains inf or NaN; nothing was changed"):
        switch.step(model, optimizer, step=0, also=[average])
    assert switch.report is None
    assert not products(model)
    assert not products(average)
