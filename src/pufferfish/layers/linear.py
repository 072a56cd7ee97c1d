"""Low-rank `nn.Linear`: n → r → m."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from .base import LowRankSingle, register
from .matrix import Matrix

if TYPE_CHECKING:
    from .shared_input import SharedInput


class LowRankLinear(LowRankSingle):
    """`y = U (V x) + b`, as two plain `nn.Linear` layers: `down` holds V (r × n), `up` holds U (m × r) and b.

    >>> import torch
    >>> layer = LowRankLinear(nn.Linear(64, 32), {"": 8})
    >>> layer
    LowRankLinear(
      rank=8
      (down): Linear(in_features=64, out_features=8, bias=False)
      (up): Linear(in_features=8, out_features=32, bias=True)
    )
    """

    _transposed = False  # whether the dense weight is stored n × m
    _shared_input: SharedInput | None = None  # the group of layers that read the same tensor

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        (matrix,) = self.matrices(dense)
        r, weight = ranks[""], cast(Tensor, dense.weight)
        self.down = nn.Linear(matrix.n, r, bias=False, device="meta", dtype=weight.dtype)
        self.up = nn.Linear(r, matrix.m, dense.bias is not None, device="meta", dtype=weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        shared = self._shared_input
        inner = None if shared is None else shared.first_product(self, input)
        return cast(Tensor, self.up(self.down(input) if inner is None else inner))

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        shape, transposed = tuple(cast(Tensor, dense.weight).shape), cls._transposed
        m, n = shape[::-1] if transposed else shape
        bias = None if dense.bias is None else "bias"
        matrix = Matrix(
            name="", weight="weight", bias=bias, shape=shape, m=m, n=n, down_row=(n,), transposed=transposed
        )
        return [matrix]


class LowRankConv1D(LowRankLinear):
    """Low-rank form of `Conv1D` of Hugging Face's GPT-2: a Linear whose weight is stored n × m."""

    _transposed = True


def is_plain(factor: nn.Module, input: Tensor) -> bool:
    """Whether a product with a factor can be computed from its weight, without calling it."""
    weight = factor._parameters.get("weight")
    return (
        type(factor) is nn.Linear
        and weight is not None
        and type(weight) in (Tensor, nn.Parameter)
        and weight.device == input.device
        and not (factor._forward_hooks or factor._forward_pre_hooks)
        and not (factor._backward_hooks or factor._backward_pre_hooks)
    )


register(nn.Linear, LowRankLinear)
register("transformers.pytorch_utils.Conv1D", LowRankConv1D)  # by name: transformers is not imported
