"""Low-rank `nn.Linear`: n → r → m."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from .base import LowRank
from .matrix import Matrix


class LowRankLinear(LowRank):
    """`y = U (V x) + b`, as two plain `nn.Linear`: `down` holds V (r × n), `up` holds U (m × r) and b.

    >>> import torch
    >>> layer = LowRankLinear(nn.Linear(64, 32), {"": 8})
    >>> layer
    LowRankLinear(
      rank=8
      (down): Linear(in_features=64, out_features=8, bias=False)
      (up): Linear(in_features=8, out_features=32, bias=True)
    )
    """

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        (matrix,) = self.matrices(dense)
        r, weight = ranks[""], cast(Tensor, dense.weight)
        self.down = nn.Linear(matrix.n, r, bias=False, device="meta", dtype=weight.dtype)
        self.up = nn.Linear(r, matrix.m, dense.bias is not None, device="meta", dtype=weight.dtype)

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        m, n = cast(Tensor, dense.weight).shape
        bias = None if dense.bias is None else "bias"
        return [Matrix(name="", weight="weight", bias=bias, shape=(m, n), m=m, n=n, down_row=(n,))]

    @property
    def weight(self) -> Tensor:
        """The product of the factors, shaped like the dense layer's weight. Read-only."""
        return self.product()

    @property
    def bias(self) -> Tensor | None:
        return self.up.bias

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.up(self.down(input))
        return output


class LowRankConv1D(LowRankLinear):
    """The same for the `Conv1D` of Hugging Face's GPT-2: a Linear whose weight is stored n × m."""

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        n, m = cast(Tensor, dense.weight).shape
        return [
            Matrix(
                name="", weight="weight", bias="bias", shape=(n, m), m=m, n=n, down_row=(n,), transposed=True
            )
        ]
