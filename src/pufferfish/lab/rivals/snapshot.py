"""`snapshot`: a copy of the state of a model and its optimizers, to rewind them to."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...layers.names import own_name, unwrap
from ...lowrank.by_name import load_optimizer, names_by_id, optimizer_state


def snapshot(model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> dict[str, Any]:
    """Copy the weights, batch statistics and optimizer state.

    >>> layer = nn.Linear(2, 2)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> early, bias = snapshot(layer, [sgd]), layer.bias.detach().clone()
    >>> _ = layer.bias.data.add_(1.0)
    >>> restore_snapshot(layer, [sgd], early)
    >>> torch.equal(layer.bias, bias)
    True
    """
    names = names_by_id(model)
    states = [optimizer_state(optimizer, names) for optimizer in optimizers]
    return copy.deepcopy({"model": _tensors(model), "optimizers": states})


@torch.no_grad()
def restore_snapshot(
    model: nn.Module, optimizers: Sequence[optim.Optimizer], saved: Mapping[str, Any]
) -> None:
    """Restore a snapshot in place: parameters stay the same tensors; gradients are cleared."""
    for name, x in _tensors(model).items():
        x.copy_(saved["model"][name])
    names = names_by_id(model)
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        load_optimizer(optimizer, names, copy.deepcopy(state))
    for p in unwrap(model).parameters():
        p.grad = None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, not copied."""
    return {own_name(name): x for name, x in unwrap(model).state_dict().items()}
