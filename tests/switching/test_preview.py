"""Previews and the losses in the report: against factorized copies; nothing changes on the way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import pufferfish as pf


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip


X, Y = torch.randn(32, 3, 8, 8), torch.randint(4, (32,))


def loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(X), Y)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(15):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def factorized_loss(model: nn.Module, plan: pf.Plan) -> float:
    other = copy.deepcopy(model)
    pf.factorize_(other, plan)
    other.eval()
    with torch.no_grad():
        return float(loss(other))


def everything(model: nn.Module) -> tuple[dict[str, Tensor], list[bool], Tensor]:
    return (
        copy.deepcopy(model.state_dict()),
        [m.training for m in model.modules()],
        torch.random.get_rng_state(),
    )


def same(
    a: tuple[dict[str, Tensor], list[bool], Tensor], b: tuple[dict[str, Tensor], list[bool], Tensor]
) -> bool:
    return all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1] == b[1] and torch.equal(a[2], b[2])


def test_a_preview_is_what_factorizing_gives_and_changes_nothing() -> None:
    model, _ = trained()
    model[1].eval()  # a mode of its own must survive
    before = everything(model)
    ranks = [0.125, 0.5, pf.Energy(0.9)]
    shown = pf.Switch(rank=0.25, keep=["0"]).preview(model, loss, ranks=ranks)
    assert same(before, everything(model))
    for rank, (_, plan, got) in zip(ranks, shown.rows, strict=True):
        assert plan.ranks == pf.resolve(pf.plan(model, rank, keep=["0"]), model).ranks
        assert got == pytest.approx(factorized_loss(model, pf.plan(model, rank, keep=["0"])), rel=1e-4)
    assert shown.before == pytest.approx(float(loss(model.eval())))
    assert "ratio 0.125" in str(shown) and "full rank" in str(shown)  # noqa: PT018


def test_a_preview_of_the_switch_itself() -> None:
    model, _ = trained()
    plan = pf.plan(model, 0.25)
    ((asked, shown, _),) = pf.Switch(plan).preview(model, loss).rows
    assert (asked, shown.ranks) == ("this switch", plan.ranks)


def test_the_report_has_the_losses_and_the_energy() -> None:
    model, optimizer = trained()
    expected = factorized_loss(model, pf.plan(model, 0.25))
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(0), evaluate=loss)
    switch.step(model, optimizer, epoch=0)
    assert switch.report is not None
    assert switch.report.loss is not None
    assert switch.report.loss[1] == pytest.approx(expected, rel=1e-4)
    assert "held-out loss" in str(switch.report)
    for e in switch.report.plan:
        if e.error is not None:
            assert switch.report.energy[e.name] == pytest.approx(1 - e.error**2)
