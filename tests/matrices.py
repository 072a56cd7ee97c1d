"""Matrices and layers made to measure."""

from typing import Any

import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.layers import Matrix


def matrix(m: int, n: int, blocks: int = 1) -> Matrix:
    return Matrix(name="", weight="weight", shape=(blocks * m, n), m=m, n=n, blocks=blocks)


def linear_with(sigma: Tensor, m: int, n: int) -> nn.Linear:
    """A layer whose weight has these singular values."""
    layer = nn.Linear(n, m, bias=False)
    k = len(sigma)
    U = torch.linalg.qr(torch.randn(m, k, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64)).Q
    layer.weight.data = (U * sigma @ V.mT).float()
    return layer


def forced(model: nn.Module, rank: int, **options: Any) -> pf.Plan:
    """The plan of these ranks, of layers too that they make larger."""
    plan = pf.plan(model, rank, **options)
    larger = {e.name: e for e in plan if e.reason.startswith("not smaller at rank ") and e.matrix}
    ranks = {name: int(e.reason.split()[4].rstrip(":")) for name, e in larger.items()}
    return plan.replace(
        e.with_rank(min(ranks[e.name], e.matrix.full_rank)) if e.matrix and e.name in larger else e
        for e in plan
    )


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )
