"""The recipe's optimizer: Muon for the matrices of blocks; fused on a GPU, and equal to the plain one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pufferfish as pf
from pufferfish.lab.models import GPT, Llama
from pufferfish.lab.tasks import Recipe
from pufferfish.lab.train import build_optimizer
from pufferfish.lab.train.optimizers import SAM

FUSED = ("sgd", "adam", "adamw")


def recipe(name: str) -> Recipe:
    return Recipe(epochs=1, batch=8, lr=0.01, optimizer=name, weight_decay=0.1, nesterov=True)


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(6, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 1, 3, bias=False))
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def set_gradients(model: nn.Module, seed: int) -> None:
    """Random gradients in the default memory format, which is not that of the weights."""
    for i, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * seed + i)
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def groups(optimizer: Any) -> list[dict[str, Any]]:
    return optimizer.param_groups  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FUSED)
def test_gradients_of_other_strides(name: str) -> None:
    """Fused kernels read memory in order: without equal strides they would mix up weights and gradients."""
    models = [convolutions()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [build_optimizer(model, recipe(name)) for model in models]
    for group in groups(optimizers[1]):
        group["fused"] = True  # as on a GPU
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            set_gradients(model, step)
            optimizer.step()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", [*FUSED, "lars", "lamb", "sam"])
def test_not_fused_on_a_cpu(name: str) -> None:
    optimizer = build_optimizer(nn.Linear(4, 4), recipe(name))
    assert not any(group.get("fused") for group in groups(optimizer))


def test_only_matrices_of_blocks_are_muons() -> None:
    for model in (GPT(d=8, layers=2, heads=2, context=4), Llama(d=8, layers=2, heads=2, context=4)):
        muon, adamw = build_optimizer(model, recipe("muon"))
        names = {id(p): name for name, p in model.named_parameters()}
        mine = {names[id(p)] for p in muon.param_groups[0]["params"]}
        theirs = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
        assert mine == {
            name for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")
        }
        assert mine | theirs == set(names.values())
        assert not mine & theirs
    with pytest.raises(ValueError, match="optimizer muon: the model has no matrices in repeated blocks"):
        build_optimizer(nn.Linear(4, 4), recipe("muon"))
    assert recipe("adamw").with_optimizer("muon").lr == 0.01


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    set_gradients(model, seed)
    if isinstance(optimizer, SAM):
        with optimizer.perturbed(model):
            set_gradients(model, seed)
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FUSED, "sam"])
def test_fused_on_a_gpu(name: str) -> None:
    """It equals the plain one on the CPU, and its state goes through the switch."""
    plain = nn.Sequential(convolutions(), nn.Linear(64, 64))
    fused = copy.deepcopy(plain).cuda()
    pairs = [
        (plain, build_optimizer(plain, recipe(name))),
        (fused, build_optimizer(fused, recipe(name))),
    ]
    optimizer = pairs[1][1]
    assert all(group["fused"] for group in groups(optimizer))
    for seed in range(3):
        for pair in pairs:
            step(*pair, seed)
    for p, q in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu())
    pf.factorize_(fused, pf.plan(fused, rank=pf.Ratio(0.25, multiple=1)), optimizer=optimizer)
    assert isinstance(fused[1], pf.layers.LowRankLinear)
    states = [optimizer.state[p] for p in fused.parameters()]
    assert all(x.is_cuda for state in states for x in state.values() if isinstance(x, torch.Tensor))
    assert all(states)
    step(fused, optimizer, 3)
    assert all(p.isfinite().all() for p in fused.parameters())
