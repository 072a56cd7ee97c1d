"""`build_optimizer`: the optimizer that a recipe asks for."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...lowrank.muon import Muon, muon_parameters
from ..rivals import LAMB, LARS, SAM
from ..tasks import Recipe
from .optimizer_list import OptimizerList

#: Optimizers that use the same learning rates as another one.
_SAME_RATES = {"sam": "sgd", "adamw": "adam", "muon": "adam"}


def with_optimizer(recipe: Recipe, name: str, lr: float | None = None) -> Recipe:
    """Return the recipe with another optimizer and learning rate.

    Args:
        lr: required if the recipe's learning rate does not fit the optimizer.

    >>> with_optimizer(Recipe(epochs=1, batch=1, lr=0.1), "sam").lr
    0.1
    >>> with_optimizer(Recipe(epochs=1, batch=1, lr=0.1), "lars")
    Traceback (most recent call last):
    ValueError: optimizer lars: pass --lr, too (in a bench @lars=LR); the recipe's 0.1 is for sgd, whose rates ...
    """
    changed = replace(recipe, optimizer=name, lr=recipe.lr if lr is None else lr)
    if lr is None and _SAME_RATES.get(name, name) != _SAME_RATES.get(recipe.optimizer, recipe.optimizer):
        raise ValueError(
            f"optimizer {name}: pass --lr, too (in a bench @{name}=LR); the recipe's {recipe.lr:g} is for "
            f"{recipe.optimizer}, whose rates have another scale"
        )
    return changed


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer | OptimizerList:
    """Build the recipe's optimizer; "muon" is Muon and AdamW, as `muon_parameters` divides the model.

    On a GPU, SGD, Adam and AdamW are fused.

    >>> [group["weight_decay"] for group in build_optimizer(nn.Linear(2, 2), Recipe(epochs=1, batch=1, lr=1.0, weight_decay=0.1)).param_groups]
    [0.1, 0.0]
    """
    rest = list(model.parameters())
    if recipe.optimizer == "muon":
        in_blocks, rest = muon_parameters(model)
        if not in_blocks:
            raise ValueError(
                "optimizer muon: the model has no matrices in repeated blocks (ModuleList, Sequential); use adamw"
            )
    matrices = [p for p in rest if p.dim() > 1]
    vectors = [p for p in rest if p.dim() < 2]
    vector_decay = recipe.weight_decay if recipe.decay_vectors else 0.0
    decays = ((matrices, recipe.weight_decay), (vectors, vector_decay))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    on_gpu = any(p.is_cuda for p in model.parameters())
    fused: dict[str, Any] = {"fused": True} if on_gpu else {}
    sgd: dict[str, Any] = {"lr": recipe.lr, "momentum": recipe.momentum, "nesterov": recipe.nesterov}
    if recipe.optimizer in ("sgd", "sam"):
        sam = recipe.optimizer == "sam"
        optimizer = (
            SAM(groups, rho=recipe.rho, **sgd, **fused) if sam else torch.optim.SGD(groups, **sgd, **fused)
        )
        optimizer.register_step_pre_hook(_match_gradient_strides)
        return optimizer
    if recipe.optimizer == "lars":
        return LARS(groups, **sgd, trust=recipe.trust)
    if recipe.optimizer == "lamb":
        return LAMB(groups, recipe.lr, betas=recipe.betas)
    kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    adam = kind(groups, lr=recipe.lr, betas=recipe.betas, **fused)
    adam.register_step_pre_hook(_match_gradient_strides)
    if recipe.optimizer != "muon":
        return adam
    muon = Muon(in_blocks, recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
    return OptimizerList([muon, adam])


def _match_gradient_strides(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give gradients their parameters' strides, also in dimensions of size 1; fused optimizers require it."""
    for p in (p for group in optimizer.param_groups if group.get("fused") for p in group["params"]):
        if p.grad is None or p.grad.stride() == p.stride():
            continue
        dimensions = zip(p.shape, p.stride(), p.grad.stride(), strict=True)
        if all(a == b for size, a, b in dimensions if size > 1):
            p.grad = p.grad.as_strided(p.shape, p.stride())
        else:
            p.grad = torch.empty_like(p).copy_(p.grad)
