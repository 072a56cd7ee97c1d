"""Copies that run: with the hooks that a model needs, and without effects on the model or its user."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.planning.private_copy import private_copy


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


def test_hooks_of_the_user_are_not() -> None:
    fired: list[str] = []
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].register_forward_hook(lambda *args, **kwargs: fired.append("forward"), with_kwargs=True)
    model[0].register_full_backward_hook(lambda *args: fired.append("backward"))
    copied: Any = private_copy(model)
    copied(torch.randn(3, 64)).sum().backward()
    assert fired == []
    assert not copied[0]._forward_hooks_with_kwargs


def test_hooks_of_torch_are_kept() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
    copied: Any = private_copy(layer)
    with torch.no_grad():
        copied.weight_g.mul_(2)
        x = torch.randn(2, 4)
        torch.testing.assert_close(copied(x) - layer.bias, 2 * (layer(x) - layer.bias))


def test_tensors_are_copied_once() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
    model[2].table = torch.ones(2)  # no buffer
    model[1].also = model[0].weight
    copied: Any = private_copy(model, lambda x: x.detach().to("meta"))
    assert {x.device.type for x in (*copied.state_dict().values(), copied[2].table)} == {"meta"}
    assert copied[1].also is copied[0].weight
