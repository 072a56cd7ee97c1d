"""The recipe's optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..rivals import LAMB, LARS, SAM
from ..tasks.task import Recipe

#: Optimizers whose rates are of the same size as another's.
_ALIKE = {"sam": "sgd", "adamw": "adam"}


def with_optimizer(recipe: Recipe, name: str, lr: float | None = None) -> Recipe:
    """The recipe with another optimizer and rate; a rate is needed where the recipe's would mean nothing.

    >>> with_optimizer(Recipe(epochs=1, batch=1, lr=0.1), "sam").lr
    0.1
    >>> with_optimizer(Recipe(epochs=1, batch=1, lr=0.1), "lars")
    Traceback (most recent call last):
    ValueError: optimizer lars: say --lr too (in a bench @lars=LR); the recipe's 0.1 is for sgd, and their rates ...
    """
    changed = replace(recipe, optimizer=name, lr=recipe.lr if lr is None else lr)
    if lr is None and _ALIKE.get(name, name) != _ALIKE.get(recipe.optimizer, recipe.optimizer):
        raise ValueError(
            f"optimizer {name}: say --lr too (in a bench @{name}=LR); the recipe's {recipe.lr:g} is for "
            f"{recipe.optimizer}, and their rates are of other sizes"
        )
    return changed


def optimizer(model: nn.Module, recipe: Recipe, *, graph: bool = False) -> torch.optim.Optimizer:
    """The recipe's, with weight decay where it says.

    Args:
        graph: for a CUDA graph: in one kernel, which reads the learning rate from the device.

    >>> [group["weight_decay"] for group in optimizer(nn.Linear(2, 2), Recipe(epochs=1, batch=1, lr=1.0, weight_decay=0.1)).param_groups]
    [0.1, 0.0]
    """
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {
            "params": [p for p in params if p.dim() < 2],
            "weight_decay": recipe.weight_decay if recipe.decay_vectors else 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    how: dict[str, Any] = {"fused": True} if graph else {}
    rule: dict[str, Any] = {"lr": recipe.lr, "momentum": recipe.momentum, "nesterov": recipe.nesterov}
    if recipe.optimizer in ("sgd", "sam"):
        sgd = torch.optim.SGD(groups, **rule, **how)
        return SAM(sgd, model, rho=recipe.rho) if recipe.optimizer == "sam" else sgd
    trusted = {"exclude_vectors": not recipe.decay_vectors}
    if recipe.optimizer == "lars":
        return LARS(groups, **rule, trust=recipe.trust, **trusted)
    if recipe.optimizer == "lamb":
        return LAMB(groups, recipe.lr, betas=recipe.betas, capturable=graph, **trusted)
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=recipe.lr, betas=recipe.betas, capturable=graph, **how)
