"""Checks for every optimizer: its formula, a switch, resuming from a checkpoint, copying."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import pufferfish as pf

#: Makes an optimizer for a model.
Make = Callable[[nn.Module], optim.Optimizer]


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 2), nn.Flatten(), nn.Linear(128, 4)
    ).to(dtype)  # fmt: skip


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(4, (8,), generator=generator)
    x = torch.randn(8, 3, 7, 7, generator=generator, dtype=torch.float64) + y.view(-1, 1, 1, 1)
    return x.to(dtype), y


def update(model: nn.Module, optimizer: optim.Optimizer, step: int) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = batch(step, next(model.parameters()).dtype)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    found: Tensor = optimizer.step(closure)
    optimizer.zero_grad()
    return found.detach()


def equal(one: nn.Module, other: nn.Module) -> None:
    for (name, x), y in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


SHAPES = ((4, 3), (4,), (2, 3, 3, 3), (), (5, 2))


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        p.grad = None if (i + step) % 4 == 3 else g  # now and then there is none


def equals_a_formula(
    make: Callable[[list[dict[str, Any]]], optim.Optimizer],
    formula: Callable[[list[nn.Parameter], dict[int, Any], dict[str, Any]], None],
    own: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """In two groups, the second with settings of its own. The formula takes a group's step, with what it keeps."""
    ours, plain = parameters(dtype), parameters(dtype)
    optimizer = make([{"params": ours[:3]}, {"params": ours[3:]} | own])
    kept: list[dict[int, Any]] = [{}, {}]
    for step in range(8):
        give_gradients(ours, step)
        give_gradients(plain, step)
        optimizer.step()
        for group, theirs, state in zip(optimizer.param_groups, (plain[:3], plain[3:]), kept, strict=True):
            formula(theirs, state, group)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def follows_a_switch(make: Make, carried: set[str]) -> None:
    """The factors get the state of their weights, all of it, and training goes on; then back to dense."""
    model = build()
    optimizer = make(model)
    switch = pf.Switch(rank=0.25, when=pf.AtStep(3), back=pf.AtStep(6))
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as state that was reset
        for step in range(30):
            if switch.step(model, optimizer, step=step):
                for name, p in model.named_parameters():
                    assert set(optimizer.state[p]) == carried, name
                    assert all(x.any() for x in optimizer.state[p].values()), name
            losses.append(update(model, optimizer, step))
    assert switch.merged is not None
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def resumes(make: Make, folder: Path) -> None:
    """A run that is stopped after its switch goes on bit for bit, from a dense model and a new optimizer."""

    def start() -> tuple[nn.Module, optim.Optimizer, pf.Switch]:
        model = build()
        return model, make(model), pf.Switch(rank=0.25, when=pf.AtStep(2))

    def go(model: nn.Module, optimizer: optim.Optimizer, switch: pf.Switch, steps: range) -> None:
        for step in steps:
            switch.step(model, optimizer, step=step)
            update(model, optimizer, step)

    through, stopped, again = start(), start(), start()
    go(*through, range(7))
    with pf.Checkpoint(folder, *stopped[:2], switch=stopped[2]) as checkpoint:
        go(*stopped, range(4))
        checkpoint.save(step=4)
    with pf.Checkpoint(folder, *again[:2], switch=again[2]) as checkpoint:
        at = checkpoint.resume()
        assert at is not None
        go(*again, range(at.position["step"], 7))
    equal(again[0], through[0])


def is_copied(make: Make) -> None:
    """A deep copy and a loaded state_dict both go on as the original, apart from it."""
    model = build()
    optimizer = make(model)
    for step in range(3):
        update(model, optimizer, step)
    one, its = copy.deepcopy((model, optimizer))
    other = copy.deepcopy(model)
    loaded = make(other)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it would share the tensors
    for step in range(3, 5):
        for net, steps_it in ((model, optimizer), (one, its), (other, loaded)):
            update(net, steps_it, step)
    equal(one, model)
    equal(other, model)


def does_not_wait(make: Callable[[list[nn.Parameter]], optim.Optimizer]) -> None:
    """Without values there is nothing to wait for: a step on the meta device reads none."""
    params = [nn.Parameter(torch.empty(3, 4, device="meta")), nn.Parameter(torch.empty(4, device="meta"))]
    optimizer = make(params)
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()


def trains_in_bf16(make: Make) -> None:
    model = build()
    optimizer = make(model)
    losses: list[Any] = []
    for step in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(update(model, optimizer, step))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert all(x.dtype == torch.float32 for state in optimizer.state.values() for x in state.values())
