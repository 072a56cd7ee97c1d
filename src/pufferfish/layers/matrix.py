"""Where the weight matrices of a dense layer lie, and where their two factors go."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix `W` (m × n, `y = W x`) of a dense layer, and its factors `W ≈ U V`.

    A layer has one (Linear, convolution) or several (recurrent layers, attention). A matrix may be a
    stack of `blocks` equal ones (groups of a convolution, gates of a recurrent layer): every block has
    its own factors of the same rank. The fields are plain data, so that a plan can carry them and files
    can be converted without building the model.
    """

    name: str  # module that holds `down` and `up`, inside the layer; "" is the layer itself
    weight: str  # the dense layer's parameter that holds the matrix
    shape: tuple[int, ...]  # that parameter's shape, or that of our rows of it
    m: int  # outputs of one block
    n: int  # inputs of one block
    blocks: int = 1
    bias: str | None = None  # the dense parameter that becomes `up.bias`
    start: int = 0  # first of our rows in the weight, where several matrices share the parameter
    bias_start: int = 0  # the same in the bias
    dense: str | None = None  # the matrix' name in the low-rank layer when it is not factorized
    transposed: bool = False  # the parameter stores inputs × outputs
    down_row: tuple[int, ...] = ()  # shape of one row of `down.weight`
    up_tail: tuple[int, ...] = ()  # what follows (m, r) in `up.weight`, or r when `up_transposed`
    up_transposed: bool = False  # `up.weight` stores r × outputs (transposed convolutions)

    @property
    def numel(self) -> int:
        """Weights of the dense matrix, all blocks."""
        return self.blocks * self.m * self.n

    @property
    def full_rank(self) -> int:
        return min(self.m, self.n)

    def factor_numel(self, r: int) -> int:
        """Weights of both factors at rank `r`, all blocks."""
        return self.blocks * r * (self.m + self.n)

    @property
    def down(self) -> str:
        return _join(self.name, "down.weight")

    @property
    def up(self) -> str:
        return _join(self.name, "up.weight")

    def moves(self, factorized: bool) -> list[tuple[str, slice, str]]:
        """(dense parameter, its rows, name in the low-rank layer) of what is carried over as it is."""
        found = []
        if not factorized:
            found.append((self.weight, self.rows, self.dense or self.weight))
        if self.bias is not None:
            rows = slice(self.bias_start, self.bias_start + self._outputs)
            found.append((self.bias, rows, _join(self.name, "up.bias" if factorized else "bias")))
        return found

    @property
    def rows(self) -> slice:
        """Our part of the dense weight parameter."""
        return slice(self.start, self.start + self.shape[0])

    @property
    def _outputs(self) -> int:
        """Output channels: the bias' length. A transposed convolution's m counts the kernel too."""
        return self.blocks * (self.up_tail[0] if self.up_transposed else self.m)

    def unroll(self, weight: Tensor) -> Tensor:
        """The dense parameter as W: (blocks, m, n)."""
        weight = weight[self.rows]
        if self.transposed:
            return weight.reshape(self.blocks, self.n, self.m).mT
        return weight.reshape(self.blocks, self.m, self.n)

    def roll(self, W: Tensor) -> Tensor:
        """W back in the shape of the dense parameter (or our rows of it)."""
        return (W.mT if self.transposed else W).reshape(self.shape)

    def fold(self, U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """U (blocks, m, r) and V (blocks, r, n) as (`down.weight`, `up.weight`)."""
        down = V.reshape(-1, *self.down_row)
        if self.up_transposed:
            return down, U.mT.reshape(-1, *self.up_tail)
        return down, U.reshape(self.blocks * self.m, -1, *self.up_tail)

    def unfold(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """(`down.weight`, `up.weight`) as U (blocks, m, r) and V (blocks, r, n)."""
        V = down.reshape(self.blocks, -1, self.n)
        if self.up_transposed:
            return up.reshape(self.blocks, -1, self.m).mT, V
        return up.reshape(self.blocks, self.m, -1), V

    def product(self, down: Tensor, up: Tensor) -> Tensor:
        """The dense parameter that the two factors stand for."""
        U, V = self.unfold(down, up)
        return self.roll(U @ V)

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == self.numel, f"{self.shape} is not {self.blocks} × {self.m} × {self.n}"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
