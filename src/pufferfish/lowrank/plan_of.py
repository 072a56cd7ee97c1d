"""`plan_of`: the plan of a model that is low-rank already."""

import dataclasses

from torch import nn

from ..layers import LowRankEmbedding, LowRankLinear, meta_copy
from ..layers.names import named_modules, unwrap
from ..planning.plan import Plan, plan
from .factorize import ranks_of
from .rewrite import merge_layers_


def plan_of(model: nn.Module, dense: nn.Module | None = None) -> Plan:
    """The plan that gives the dense model the ranks that this model has now.

    Args:
        dense: The dense model, which may be on the meta device. Needed for FSDP2 models only, which cannot be copied.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> _ = pf.factorize_(model, pf.plan(model, rank=8, keep=["1"]))
    >>> pf.lowrank.plan_of(model).ranks
    {'0': {'': 8}}
    """
    ranks = ranks_of(model)
    if dense is None:
        dense = meta_copy(unwrap(model))
        merge_layers_(dense, None)
    embed = 1 if any(isinstance(m, LowRankEmbedding) for m in model.modules()) else None
    dense_plan = plan(dense, embed=embed)
    entries = []
    for e in dense_plan.entries:
        rank = ranks.get(e.layer, {}).get(e.matrix.name) if e.matrix else None
        reason = e.reason if e.matrix is None else "not factorized"
        entries.append(e.with_rank(rank) if rank else e.keep_dense(reason))
    layers = {e.layer for e in entries}  # not the projections inside of an attention layer
    shared: dict[int, list[str]] = {}
    for name, _, module in named_modules(model):
        if isinstance(module, LowRankLinear) and module._shared_input is not None and name in layers:
            shared.setdefault(id(module._shared_input), []).append(name)
    return dataclasses.replace(dense_plan.replace(entries), shared_inputs=tuple(map(tuple, shared.values())))
