"""`ranks_by_loss`: spend the weights that a plan keeps where they lower the held-out loss most."""

import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ..layers.matrix import at_least_fp32
from ..layers.names import named_modules
from ..lowrank.factorize import svd_factors
from ..planning.plan import Entry, Plan
from ..planning.rules import align

#: Shares of a matrix' weights that are tried, besides its planned rank and all of them.
SHARES = 0.125, 0.25, 0.5, 0.75

#: Number of weights of a matrix → its entry at that size, and how much the loss rises if only this matrix has it.
Sizes = dict[int, tuple[Entry, float]]


def ranks_by_loss(model: nn.Module, plan: Plan, loss: Callable[[], float]) -> Plan:
    """Choose other ranks for a plan that keeps as many weights, or fewer, but raises the loss less.

    The loss is computed with each matrix alone at a few ranks. All matrices then start at their lowest, and the next rank goes to
    the matrix whose loss falls most for the weights it costs. The energy of singular values is a bad guide to this: weights
    that Muon trains have flat spectra, whether the loss needs them or not.

    Args:
        plan: With all ranks.
        loss: Computes the held-out loss of `model`, whose weights are changed in between and restored.
    """
    layers = {name: module for name, _, module in named_modules(model)}
    chosen = [e for e in plan if e.rank]
    before = loss()
    sizes = {e.name: _try_sizes(e, plan, layers[e.layer], loss, before) for e in chosen}
    now = {name: min(known) for name, known in sizes.items()}
    left = sum(e.after for e in chosen) - sum(now.values())
    while steps := [
        ((known[now[name]][1] - rise) / (size - now[name]), name, size)
        for name, known in sizes.items()
        for size, (_, rise) in known.items()
        if 0 < size - now[name] <= left and rise < known[now[name]][1]
    ]:
        _, name, size = max(steps)
        left -= size - now[name]
        now[name] = size
    return plan.replace(sizes[e.name][now[e.name]][0] if e.rank else e for e in plan)


def _try_sizes(e: Entry, plan: Plan, layer: nn.Module, loss: Callable[[], float], before: float) -> Sizes:
    """Compute the loss with one matrix at several ranks. One SVD serves all of them."""
    assert e.matrix is not None
    assert e.rank is not None
    x, weight = e.matrix, layer.get_parameter(e.matrix.weight).data
    shares = [int(share * x.m * x.n / (x.m + x.n)) for share in SHARES]
    ranks = sorted({e.rank, *(align(r, x, plan.multiple, plan.min_saving) for r in shares)})
    down, up, _ = svd_factors(e.with_rank(ranks[-1]), weight)
    U, V = map(at_least_fp32, x.to_factors(down, up))
    own = weight[x.index].clone()
    lowered = replace(e, asked=e.asked or e.rank)
    sizes = {e.before: (lowered.keep_dense("the held-out loss needs its full rank"), 0.0)}
    try:
        for r in ranks:
            weight[x.index] = x.from_matrix(U[..., :r] @ V[:, :r]).to(weight.dtype)
            rise = loss() - before
            sizes[x.factor_numel(r)] = lowered.with_rank(r), math.inf if math.isnan(rise) else rise
    finally:
        weight[x.index] = own
    return sizes
