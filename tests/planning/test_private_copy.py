"""Copies that run: with the hooks that a model needs, and without effects on the model or its user."""

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.planning.private_copy import private_copy, to_meta


class Captures(nn.Module):
    """Needs the hook that it has registered on its child, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.seen: list[Tensor] = []
        self.layer.register_forward_hook(self.capture)

    def capture(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        return self.layer(self.seen.pop())


def test_methods_of_the_model_are_bound_to_the_copy() -> None:
    model, x = Captures(), torch.randn(3, 64)
    model(x)
    assert len(model.seen) == 1
    model.seen.clear()
    copied: Any = private_copy(model)
    assert torch.equal(copied(x), model(x))
    assert (len(model.seen), len(copied.seen)) == (1, 1)
    model.seen.clear()
    assert pf.plan(model, example=x)["layer"].positions == 6
    assert model.seen == []


def library(folder: Path, name: str) -> ModuleType:
    """Import a module with a model that captures outputs by hooks which it installs once, as transformers does."""
    (folder / f"{name}.py").write_text(
        """
from torch import nn

collected = []

def capture(module, args, kwargs, output):
    assert kwargs == {}
    collected.append(output)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.captures_hooks = False

    def forward(self, x):
        if not self.captures_hooks:
            self.layer.register_forward_hook(capture, with_kwargs=True)
            self.captures_hooks = True
        collected.clear()
        self.layer(x)
        return self.layer(collected[0])
"""
    )
    sys.path.insert(0, str(folder))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(folder))


def test_hooks_of_the_library_that_defines_the_model_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    model, x = library(folder, "made_up_library").Model(), torch.randn(3, 64)
    before = pf.plan(model, example=x)
    model(x)
    assert len(model.layer._forward_hooks) == 1
    assert pf.plan(model, example=x) == before
    assert pf.plan(model, example=lambda m: m(x)).before == before.before  # a real copy
    assert before["layer"].positions == 6


def test_hooks_of_the_user_are_not(tmp_path: Path) -> None:
    """Also where the user's code defines the model, too."""
    user = library(tmp_path, "made_up_script")
    model, x = user.Model(), torch.randn(3, 64)
    model.layer.register_forward_hook(user.capture, with_kwargs=True)
    model.layer.register_full_backward_hook(lambda *args: user.collected.append("backward"))
    copied = private_copy(model)
    copied.layer(x).sum().backward()
    assert user.collected == []
    assert not copied.layer._forward_hooks_with_kwargs


def test_hooks_of_torch_are_kept() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
    copied: Any = private_copy(layer)
    with torch.no_grad():
        copied.weight_g.mul_(2)
        x = torch.randn(2, 4)
        torch.testing.assert_close(copied(x) - layer.bias, 2 * (layer(x) - layer.bias))


def test_a_real_copy_is_independent() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = copy.deepcopy(model.state_dict())
    copied = private_copy(model)
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.zero_()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_a_meta_copy_has_all_tensors_on_meta() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.LazyLinear(2), nn.Linear(3, 4))
    model[3].weight = nn.Parameter(model[0].weight.detach().T.contiguous(), requires_grad=False)
    model[3].table = torch.ones(2)  # no buffer
    model[1].also = model[0].weight
    copied: Any = private_copy(model, to_meta)
    assert {x.device.type for x in (*copied.parameters(), *copied.buffers(), copied[3].table)} == {"meta"}
    assert copied[1].also is copied[0].weight
    assert not copied[3].weight.requires_grad
    assert isinstance(copied[2].weight, nn.parameter.UninitializedParameter)
    assert type(model[2]) is nn.LazyLinear
