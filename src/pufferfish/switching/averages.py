"""Averaged copies of a model (EMA, SWA) made low-rank in the live model's own factors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..distributed.rewrap import find_ddp, rewrap_
from ..layers import LowRank
from ..layers.names import named_modules, unwrap
from ..lowrank.factorize import convert
from ..optim.carry import wide
from ..planning.plan import Entry, Plan


def follow_(average: nn.Module, live: nn.Module, plan: Plan) -> None:
    """Make a dense `average` low-rank as `live` has just become.

    Averages of factors mean something only in one basis: the copy's own SVD would turn and mirror them. So
    its weights are projected on the live factors, W̄ ≈ Ū V̄ with Ū = W̄ V⁺ and then V̄ = Ū⁺ W̄.
    """
    layers = {name: m for name, _, m in named_modules(live) if isinstance(m, LowRank)}

    def fill(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
        assert e.matrix is not None
        x, layer = e.matrix, layers[e.layer]
        _, V = x.unfold(*(wide(layer.get_parameter(name).detach().to(weight)) for name in (x.down, x.up)))
        W = x.unroll(wide(weight.detach()))
        U = W @ torch.linalg.pinv(V)
        return *x.fold(U, torch.linalg.pinv(U) @ W), None

    convert(unwrap(average), plan, None, fill)
    if (ddp := find_ddp(average)) is not None:
        rewrap_(ddp, {})
