"""Muon, beside an AdamW for what is no matrix, across the switch and back."""

from __future__ import annotations

import copy
import warnings

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


def test_momentum_becomes_that_of_the_factors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 4, bias=False))
    muon = optim.Muon(model.parameters(), 0.01)
    for _ in range(3):
        model(torch.randn(8, 32)).square().mean().backward()
        muon.step()
        muon.zero_grad()
    M = muon.state[model[0].weight]["momentum_buffer"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.factorize_(model, pf.plan(model, 8, only=["0"], multiple=1), muon)
    up, down = model[0].up.weight, model[0].down.weight
    # The gradients that the factors would have if M were the gradient of their product.
    expected = torch.autograd.grad(((up @ down) * M).sum(), (up, down))
    carried = [muon.state[p]["momentum_buffer"].clone() for p in (up, down)]
    torch.testing.assert_close(carried, list(expected))
    pf.merge_(model, muon)
    # The part of M that steps of the factors can follow comes back.
    back = muon.state[model[0].weight]["momentum_buffer"]
    torch.testing.assert_close([back @ down.mT, up.mT @ back], carried, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("order", [1, -1], ids=["Muon first", "AdamW first"])
@pytest.mark.parametrize("kind", [optim.Muon, pf.Muon], ids=["torch", "pf"])
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


class Filter(nn.Module):
    """A Linear whose weight is stored as a filter of one tap."""

    bias = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[..., 0].mT


class LowRankFilter(pf.layers.LowRankLinear):
    """Its factors are matrices, the dense weight is not."""

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[pf.layers.Matrix]:
        m, n, _ = shape = tuple(dense.get_parameter("weight").shape)
        return [pf.layers.Matrix(name="", weight="weight", shape=shape, m=m, n=n, down_row=(n,))]


pf.register(Filter, LowRankFilter)


def test_a_merged_weight_that_is_no_matrix_goes_to_the_other_optimizer() -> None:
    model = nn.Sequential(Filter(), nn.ReLU(), nn.Linear(24, 5))
    pf.factorize_(model, pf.plan(model, 4, only=["0"]))
    factors = [model[0].down.weight, model[0].up.weight]
    muon, adamw = optim.Muon(factors), optim.AdamW(model[2].parameters())
    train_on_ones(model, [muon, adamw])
    with pytest.raises(ValueError, match=r"0\.weight: its shape is 24×16×1, but Muon takes matrices only"):
        pf.merge_(model, muon)
    assert list(map(id, muon.param_groups[0]["params"])) == list(map(id, factors))
    pf.merge_(model, [muon, adamw])
    assert names_in(model, [muon, adamw]) == [[[]], [["0.weight", "2.weight", "2.bias"]]]
    train_on_ones(model, [muon, adamw])


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


def test_state_dicts_go_on_bit_by_bit() -> None:
    """A new model with the structure and the state of the old one, as for a checkpoint."""
    model = Net()
    optimizers = muon_and_adamw(model, pf.Muon)
    train(model, optimizers, range(3))
    done = pf.factorize_(model, plan(model), optimizers)
    train(model, optimizers, range(3, 5))
    saved = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimizers]))
    fresh = Net()
    others = muon_and_adamw(fresh, pf.Muon)
    pf.reshape_(fresh, done, others)
    fresh.load_state_dict(saved[0])
    for other, state in zip(others, saved[1], strict=True):
        other.load_state_dict(state)
    train(model, optimizers, range(5, 7))
    train(fresh, others, range(5, 7))
    for one, other_one in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other_one)


def test_frobenius_decay_of_factors_in_two_optimizers() -> None:
    """The decay of each factor is that of the product, also where Muon has one factor and AdamW the other."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.GRU(24, 16)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    strength, lr = 0.3, 0.1
    for model, decays in zip(models, (True, False), strict=True):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        # Without gradients, the factors move by this decay alone.
        optimizers = [optim.Muon(matrices, lr, weight_decay=0.0), optim.AdamW(vectors, lr, weight_decay=0.0)]
        pf.factorize_(model, pf.plan(model, 4), optimizers)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        if decays:
            pf.FrobeniusDecay(model, optimizers, strength)
        for optimizer in optimizers:
            optimizer.step()
    for gate in ("weight_ih_l0", "weight_hh_l0"):
        (down, up), (down0, up0) = (
            [model[0].get_parameter(f"{gate}.{side}.weight").detach() for side in ("down", "up")]
            for model in models
        )
        U, V = up0.reshape(3, 16, 4), down0.reshape(3, 4, -1)
        V1 = V - lr * strength * U.mT @ U @ V
        torch.testing.assert_close(down, V1.reshape(down.shape))
        torch.testing.assert_close(up, (U - lr * strength * U @ V1 @ V1.mT).reshape(up.shape))
