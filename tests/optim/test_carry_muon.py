"""Muon, beside an AdamW for what is no matrix, across the switch and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn, optim

import pufferfish as pf
from nested import equal
from optimizers import Net, muon_and_adamw, plan, train


def names_in(model: nn.Module, optimizers: list[optim.Optimizer]) -> list[list[list[str]]]:
    """Names of the parameters by optimizer and group, after a check that the optimizers fit the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[[names[id(p)] for p in group["params"]] for group in o.param_groups] for o in optimizers]
    assert sorted(name for one in groups for group in one for name in group) == sorted(names.values())
    for optimizer, own in zip(optimizers, groups, strict=True):
        assert [group.get("param_names", own[i]) for i, group in enumerate(optimizer.param_groups)] == own
        assert {id(p) for p in optimizer.state} <= {
            id(p) for g in optimizer.param_groups for p in g["params"]
        }
        for p, state in optimizer.state.items():
            assert all(x.shape == p.shape for x in state.values() if isinstance(x, Tensor) and x.dim())
    return groups


@pytest.mark.parametrize("order", [1, -1], ids=["Muon first", "AdamW first"])
@pytest.mark.parametrize("kind", [optim.Muon, pf.lowrank.Muon], ids=["torch", "pf"])
def test_new_parameters_go_where_the_old_ones_were(kind: type[optim.Muon], order: int) -> None:
    model = Net()
    optimizers = muon_and_adamw(model, kind)
    muon, adamw = optimizers
    train(model, optimizers, range(2))
    dense = names_in(model, optimizers)
    pf.factorize_(model, plan(model), optimizers[::order])
    (first, second), (vectors, filters) = names_in(model, optimizers)
    sides = ("down.weight", "up.weight")
    assert first == [f"{x}.{side}" for x in ("fc", *(f"attention.{x}" for x in "qkv")) for side in sides]
    gates = [f"gru.weight_{x}_l0" for x in ("ih", "hh")]
    out = [f"attention.out.{side}" for side in sides]
    assert second == [*out, *(f"{x}.down.weight" for x in gates), "head.weight"]
    # Second factors of gates are stacks, which Muon does not take. AdamW has had the filters from the start.
    assert filters == [*(f"{x}.up.weight" for x in gates), *(f"conv.{side}" for side in sides)]
    assert {model.get_parameter(name).dim() for name in vectors} == {1}
    assert muon.state[model.get_parameter(f"{gates[0]}.down.weight")]["momentum_buffer"].any()
    assert model.get_parameter(f"{gates[0]}.up.weight") not in adamw.state
    assert adamw.state[model.conv.up.weight]["exp_avg_sq"].any()
    train(model, optimizers, range(2, 4))
    pf.merge_(model, optimizers[::order])
    assert names_in(model, optimizers) == dense
    assert muon.state[model.fc.weight]["momentum_buffer"].any()
    assert model.gru.weight_ih_l0 not in muon.state  # only one of its factors had a momentum
    train(model, optimizers, range(4, 6))
    assert all(p.isfinite().all() for p in model.parameters())


def test_without_another_optimizer_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.GRU(24, 16))
    muon = optim.Muon([p for p in model.parameters() if p.dim() == 2])
    for p in muon.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    muon.step()
    before = list(model.parameters()), list(muon.param_groups[0]["params"]), copy.deepcopy(muon.state_dict())
    with pytest.raises(ValueError, match=r"1\.weight_ih_l0\.up\.weight: .*48×4×1, but Muon .* AdamW"):
        pf.factorize_(model, pf.plan(model, 4), muon)
    for now, then in zip((model.parameters(), muon.param_groups[0]["params"]), before[:2], strict=True):
        assert list(map(id, now)) == list(map(id, then))
    equal(muon.state_dict(), before[2])
    pf.factorize_(
        model, pf.plan(model, 4, keep=["1"]), muon
    )  # without stacks there is no need for another one


def train_on_ones(model: nn.Module, optimizers: list[optim.Optimizer]) -> None:
    model(torch.ones(2, 16)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_factors_in_two_optimizers_become_one_weight_in_one_of_them() -> None:
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Linear(24, 5))
    pf.factorize_(model, pf.plan(model, 4, only=["0"]))
    optimizers: list[optim.Optimizer] = [
        optim.SGD([model[0].up.weight, *model[1].parameters()], 0.1, momentum=0.9),
        optim.Adam([model[0].down.weight]),
    ]
    train_on_ones(model, optimizers)
    pf.merge_(model, optimizers)
    assert names_in(model, optimizers) == [[["1.weight", "1.bias"]], [["0.weight"]]]
    train_on_ones(model, optimizers)


def test_factors_that_are_no_matrices_go_to_an_optimizer_of_vectors() -> None:
    model = nn.Sequential(nn.LSTM(32, 32))
    matrices, vectors = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    muon, adamw = optim.Muon(matrices), optim.AdamW(vectors)
    pf.factorize_(model, pf.plan(model, 4), [muon, adamw])
    first, second = names_in(model, [muon, adamw])
    assert first == [["0.weight_ih_l0.down.weight", "0.weight_hh_l0.down.weight"]]
    assert sorted(second[0])[2:] == ["0.weight_hh_l0.up.weight", "0.weight_ih_l0.up.weight"]
