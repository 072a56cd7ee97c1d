"""`Matrix`: layout of a weight matrix in a dense layer and of its factors; `FactorMap`: the parameters of a layer in both forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .names import join_name

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix `W` (m × n, `y = W x`) of a dense layer, and its factors `W ≈ U V`.

    A layer has one (Linear, convolution) or several (recurrent layers, attention). A matrix may be a stack
    of equal `blocks` (groups of a convolution, gates of a recurrent layer, experts of a mixture); every block
    has its own factors of the same rank. The fields are plain data: plans save them, and files are converted
    without building the model.
    """

    name: str  # submodule of the low-rank layer that holds `down` and `up`; "" is the layer itself
    weight: str  # parameter of the dense layer that holds the matrix
    shape: tuple[int, ...]  # shape of that parameter, or of the matrix' part of it
    m: int  # outputs of one block
    n: int  # inputs of one block
    blocks: int = 1
    bias: str | None = None  # dense parameter that becomes `up.bias`
    start: int = 0  # first row of the matrix in `weight`, where several matrices share the parameter
    dim: int = 0  # dimension of `weight` that holds these rows
    step: int = 1  # distance between these rows: 2 where two matrices are interleaved
    bias_start: int = 0  # first row in `bias`, whose rows have the same distance
    dense: str | None = None  # parameter of the low-rank layer that holds the matrix if it is not factorized
    transposed: bool = False  # the parameter stores inputs × outputs
    down_row: tuple[int, ...] = ()  # shape of one row of `down.weight`
    up_tail: tuple[int, ...] = ()  # dimensions after (m, r) in `up.weight`, or after r if `up_transposed`
    up_transposed: bool = False  # `up.weight` stores r × outputs (transposed convolutions)
    lookup: bool = False  # rows are looked up (embeddings): no MACs, and `down.weight` stores inputs × r
    routed: bool = False  # each vector is multiplied by one block only; factors and bias are stacks too

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == self.numel, f"{self.shape} is not {self.blocks} × {self.m} × {self.n}"

    @property
    def numel(self) -> int:
        """Number of weights of the dense matrix, all blocks."""
        return self.blocks * self.m * self.n

    @property
    def full_rank(self) -> int:
        """min(m, n)."""
        return min(self.m, self.n)

    def factor_numel(self, r: int) -> int:
        """Number of weights of both factors at rank `r`, all blocks."""
        return self.blocks * r * (self.m + self.n)

    @property
    def down(self) -> str:
        """Name of the parameter V in the low-rank layer."""
        return join_name(self.name, "down.weight")

    @property
    def up(self) -> str:
        """Name of the parameter U in the low-rank layer."""
        return join_name(self.name, "up.weight")

    @property
    def used_blocks(self) -> int:
        """Number of blocks that multiply one vector."""
        return 1 if self.routed else self.blocks

    def copied_slices(self, factorized: bool) -> list[tuple[str, Index, str]]:
        """Slices that are copied unchanged: (dense parameter, their index, name in the low-rank layer)."""
        slices = []
        if not factorized:
            slices.append((self.weight, self.index, self.dense or self.weight))
        if self.bias is not None:
            target = join_name(self.name, "up.bias" if factorized else "bias")
            slices.append((self.bias, self._bias_index, target))
        return slices

    @property
    def index(self) -> Index:
        """Index of this matrix in its dense parameter."""
        return _index(self.dim, self.start, self.shape[self.dim], self.step)

    @property
    def _bias_index(self) -> Index:
        # `m` of a transposed convolution counts the kernel too.
        outputs = self.up_tail[0] if self.up_transposed else self.m
        if self.routed:
            return _index(1, self.bias_start, outputs, self.step)
        return _index(0, self.bias_start, self.blocks * outputs, self.step)

    def least_shape(self, parameter: str) -> tuple[int, ...]:
        """Smallest shape of a dense parameter that contains this matrix or its bias; () if it has neither."""
        if parameter == self.weight:
            shape, index = self.shape, self.index
        elif parameter == self.bias:
            index = self._bias_index
            shape = (self.blocks, 0) if self.routed else (0,)
        else:
            return ()
        return (*(part.stop or size for part, size in zip(index, shape, strict=False)), *shape[len(index) :])

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Convert the dense parameter to W (blocks, m, n)."""
        weight = weight[self.index]
        if self.transposed:
            return weight.reshape(self.blocks, self.n, self.m).mT
        return weight.reshape(self.blocks, self.m, self.n)

    def from_matrix(self, W: Tensor) -> Tensor:
        """Convert W (blocks, m, n) to the shape of the dense parameter, or of this matrix' part of it."""
        return (W.mT if self.transposed else W).reshape(self.shape)

    def to_factors(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Convert (`down.weight`, `up.weight`) to U (blocks, m, r) and V (blocks, r, n)."""
        V = down.mT[None] if self.lookup else down.reshape(self.blocks, -1, self.n)
        if self.up_transposed:
            return up.reshape(self.blocks, -1, self.m).mT, V
        return up.reshape(self.blocks, self.m, -1), V

    def from_factors(self, U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """Convert U (blocks, m, r) and V (blocks, r, n) to (`down.weight`, `up.weight`)."""
        if self.routed:
            return V, U
        down = V[0].mT.contiguous() if self.lookup else V.reshape(-1, *self.down_row)
        if self.up_transposed:
            return down, U.mT.reshape(-1, *self.up_tail)
        return down, U.reshape(self.blocks * self.m, -1, *self.up_tail)

    def product(self, down: Tensor, up: Tensor) -> Tensor:
        """Product of the factors in their dtype, in the shape of the dense parameter."""
        U, V = self.to_factors(down, up)
        return self.from_matrix(U @ V)

    def product_fp32(self, down: Tensor, up: Tensor) -> Tensor:
        """Product U V (blocks, m, n), computed in fp32, or in fp64 for fp64 factors."""
        U, V = map(at_least_fp32, self.to_factors(down, up))
        return U @ V


@dataclass
class FactorMap:
    """Parameters of one layer in its dense and its low-rank form, by their names in the layer."""

    matrices: list[Matrix]
    ranks: Mapping[str, int]  # of the factorized matrices, by `Matrix.name`
    dense: dict[str, Tensor]
    low_rank: dict[str, Tensor]

    @property
    def targets(self) -> dict[str, list[str]]:
        """Low-rank parameters that each dense parameter becomes. A single one means that it is only renamed."""
        targets: dict[str, list[str]] = {}
        for x in self.matrices:
            factorized = x.name in self.ranks
            if factorized:
                targets.setdefault(x.weight, []).extend((x.down, x.up))
            for source, _, target in x.copied_slices(factorized):
                targets.setdefault(source, []).append(target)
        return targets

    def assemble(
        self, name: str, out: Tensor, product: Callable[[Matrix], Tensor], copied: Callable[[str], Tensor]
    ) -> Tensor:
        """Fill the dense tensor `out` of parameter `name`.

        `product` gives W (blocks, m, n) of a matrix, `copied` a slice by its name in the low-rank layer.
        """
        for x in self.matrices:
            factorized = x.name in self.ranks
            if factorized and x.weight == name:
                out[x.index] = x.from_matrix(product(x)).to(out.dtype)
            for source, index, target in x.copied_slices(factorized):
                if source == name:
                    out[index] = copied(target).to(out.dtype)
        return out


def _index(dim: int, start: int, length: int, step: int) -> Index:
    return (*[slice(None)] * dim, slice(start, start + (length - 1) * step + 1, step))


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert to fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()
