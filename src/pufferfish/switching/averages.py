"""Averaged copies of a model (EMA, SWA) become low-rank in the basis of the model's factors."""

import torch
from torch import Tensor, nn

from ..layers.matrix import at_least_fp32
from ..layers.names import own_name, unwrap
from ..lowrank.rewrite import Fill
from ..planning.entries import Entry


def averaged_model(average: nn.Module, model: nn.Module) -> nn.Module:
    """The copy of `model` inside an average: torch's AveragedModel, or any module that holds it as its child `module`."""
    inner, expected = unwrap(average), _names(model)
    while _names(inner) != expected and "module" in inner._modules:
        inner = unwrap(inner.get_submodule("module"))
    return inner


def _names(model: nn.Module) -> set[str]:
    return {own_name(name) for name, _ in model.named_parameters()}


def in_basis_of(factors: Fill) -> Fill:
    """The factors of an average, given those of the model.

    Factors can be averaged only in a common basis, and an SVD of the average would rotate and reflect it. Its
    weights are projected on the model's factors instead: W̄ ≈ Ū V̄ with Ū = W̄ V⁺ and then V̄ = Ū⁺ W̄.
    """

    def fill(e: Entry, W: Tensor) -> tuple[Tensor, Tensor, float | None]:
        _, V, _ = factors(e, W)
        W = at_least_fp32(W)
        U = W @ torch.linalg.pinv(at_least_fp32(V.to(W)))
        return U, torch.linalg.pinv(U) @ W, None

    return fill
