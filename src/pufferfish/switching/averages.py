"""`factorize_average_`: make an averaged copy of a model (EMA, SWA) low-rank in the basis of the model's factors."""

import torch
from torch import Tensor, nn

from ..distributed.job import find_ddp, rewrap_
from ..layers import LowRank
from ..layers.matrix import at_least_fp32
from ..layers.names import named_modules, unwrap
from ..lowrank.factorize import replace_layers_
from ..planning.plan import Entry, Plan


def factorize_average_(average: nn.Module, model: nn.Module, plan: Plan) -> None:
    """Make a dense `average` low-rank like `model`, in place.

    Factors can be averaged only in a common basis, and an SVD of the average would rotate and reflect it. Its
    weights are projected on the model's factors instead: W̄ ≈ Ū V̄ with Ū = W̄ V⁺ and then V̄ = Ū⁺ W̄.

    Args:
        model: without wrappers, already low-rank.
        plan: with all ranks, as applied to `model`.
    """
    layers = {name: m for name, _, m in named_modules(model) if isinstance(m, LowRank)}

    def fill(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
        assert e.matrix is not None
        x, layer = e.matrix, layers[e.layer]
        _, V = x.to_factors(
            *(at_least_fp32(layer.get_parameter(name).detach().to(weight)) for name in (x.down, x.up))
        )
        W = x.to_matrix(at_least_fp32(weight.detach()))
        U = W @ torch.linalg.pinv(V)
        return *x.from_factors(U, torch.linalg.pinv(U) @ W), None

    replace_layers_(unwrap(average), plan, None, fill)
    if (ddp := find_ddp(average)) is not None:
        rewrap_(ddp, {})
