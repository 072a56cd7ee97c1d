"""Matrices and layers made to measure."""

import torch
from torch import Tensor, nn

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


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )
