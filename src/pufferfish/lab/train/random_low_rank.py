"""`random_low_rank_`: a model with the structure of a plan and random factors, for timing."""

import torch
from torch import nn

from ...lowrank.rewrite import reshape_
from ...planning.plan import Plan


def random_low_rank_(model: nn.Module, plan: Plan) -> nn.Module:
    """Give a model the low-rank structure of a plan, in place, without an SVD: random factors take as much time.

    >>> from pufferfish.planning.plan import plan
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> random_low_rank_(model, plan(model, 0.25))(torch.ones(1, 64)).isfinite().all()
    tensor(True)
    """
    reshape_(model, plan)
    for p in model.parameters():
        if torch.isnan(p.detach()).any():
            nn.init.normal_(p, std=0.02)
    return model
