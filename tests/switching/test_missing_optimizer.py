"""Optimizers that nobody passed to the switch."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import pufferfish as pf
from processes import in_processes


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def test_optimizers_of_the_past_and_of_other_parameters_do_not_count() -> None:
    model, other = build(), build()
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    old.itself = old  # type: ignore[attr-defined]  # only the collector finds out that nobody holds it
    del old
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    last = torch.optim.SGD(model[4].parameters(), lr=0.1)  # a layer that stays
    optimizer = torch.optim.SGD(model[:4].parameters(), lr=0.1)
    assert pf.Switch(rank=8, keep=["4"], when=pf.AtEpoch(0)).step(model, optimizer, epoch=0)
    assert len(elsewhere.param_groups) == len(last.param_groups) == 1


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (False, r"2\.weight: another optimizer \(AdamW\) holds this parameter and was not passed"),
        (True, r"2\.weight: .* no optimizer that was passed .*; pass every optimizer"),
    ],
)
def test_a_forgotten_optimizer_is_noticed_and_nothing_changes(frozen: bool, message: str) -> None:
    """Also where the collector is told to forget all objects that live now, as training loops do for speed."""
    model, other = build(), build()
    body = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.1)
    head = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    if frozen:
        gc.freeze()
    switch = pf.Switch(rank=8, when=pf.AtEpoch(0))
    with pytest.raises(ValueError, match=message):
        switch.step(model, body, epoch=0)
    assert not any(isinstance(m, pf.layers.LowRank) for m in model.modules())
    assert switch.step(model, [body, head], epoch=0)
    held = [p for o in (body, head) for g in o.param_groups for p in g["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    first = torch.optim.SGD(other[0].parameters(), lr=0.1)
    with pytest.warns(
        UserWarning, match=r"2\.weight is replaced .* but no optimizer that was passed holds it"
    ):
        pf.factorize_(other, pf.plan(other, rank=8), first)


def test_weights_that_nobody_trains_need_no_optimizer() -> None:
    model = build()
    plan = pf.plan(model, rank=8)
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.1)
    assert pf.Switch(plan, when=pf.AtEpoch(0)).step(model, optimizer, epoch=0)
    assert not any(p.requires_grad for p in (model[2].down.weight, model[2].up.weight))


def sharded_state(rank: int, size: int) -> None:
    model = build()
    wrapper = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for passed in (wrapper, wrapper.optim, [wrapper, wrapper.optim]):
        with pytest.raises(TypeError, match=r"^ZeroRedundancyOptimizer contains AdamW, .* delete it first"):
            pf.Switch(rank=8, when=pf.AtEpoch(0)).step(model, passed, epoch=0)
    assert not any(isinstance(m, pf.layers.LowRank) for m in model.modules())


def test_an_optimizer_that_shards_its_state() -> None:
    in_processes(sharded_state, 1)
