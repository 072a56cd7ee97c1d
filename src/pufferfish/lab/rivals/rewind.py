"""A model and its optimizers as they were after some update: taken, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...layers.names import own_name, unwrap
from ...optim.by_name import load_optimizer, names_of, optimizer_state


def taken(model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> dict[str, Any]:
    """All that training has made of them, as copies: weights, batch statistics, optimizer state.

    >>> layer = nn.Linear(2, 2)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> early, bias = taken(layer, [sgd]), layer.bias.detach().clone()
    >>> _ = layer.bias.data.add_(1.0)
    >>> put_back(layer, [sgd], early)
    >>> torch.equal(layer.bias, bias)
    True
    """
    names = names_of(model)
    states = [optimizer_state(optimizer, names) for optimizer in optimizers]
    now: dict[str, Any] = copied({"model": _tensors(model), "optimizers": states})
    return now


@torch.no_grad()
def put_back(model: nn.Module, optimizers: Sequence[optim.Optimizer], early: Mapping[str, Any]) -> None:
    """As they were then. Parameters stay the same tensors; gradients are gone."""
    for name, x in _tensors(model).items():
        x.copy_(early["model"][name])
    names = names_of(model)
    for optimizer, state in zip(optimizers, early["optimizers"], strict=True):
        load_optimizer(optimizer, names, copied(state))
    for p in unwrap(model).parameters():
        p.grad = None


def copied(x: Any) -> Any:
    """A state of its own: nested dicts and lists, with tensors copied where they are."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, dict):
        return {key: copied(value) for key, value in x.items()}
    return [copied(value) for value in x] if isinstance(x, list) else x


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and those buffers that are saved, by own name; the model's own, not copies."""
    return {own_name(name): x for name, x in unwrap(model).state_dict(keep_vars=True).items()}
