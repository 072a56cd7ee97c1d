"""`Matrix`: layout of a weight matrix in a dense layer and of its factors; `FactorMap`: all tensors of a model in both forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .names import own_name

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix `W` (m × n, `y = W x`) of a dense layer, and its factors `W ≈ U V`.

    A layer has one (Linear, convolution) or several (recurrent layers, attention). A matrix may be a stack
    of equal `blocks` (groups of a convolution, gates of a recurrent layer, experts of a mixture); every block
    has its own factors of the same rank. The fields are plain data: plans save them, and files are converted
    without building the model.

    Args:
        name: Submodule of the low-rank layer that holds `down` and `up`; "" is the layer itself.
        weight: Parameter of the dense layer that holds the matrix.
        shape: Shape of that parameter, or of the matrix' part of it.
        m: Outputs of one block.
        n: Inputs of one block.
        blocks: Number of blocks.
        bias: Dense parameter that becomes `up.bias`.
        start: First row of the matrix in `weight`, where several matrices share the parameter.
        dim: Dimension of `weight` that holds these rows.
        step: Distance between these rows: 2 where two matrices are interleaved.
        bias_start: First row in `bias`, whose rows have the same distance.
        dense: Parameter of the low-rank layer that holds the matrix if it is not factorized.
        transposed: The parameter stores inputs × outputs.
        down_row: Shape of one row of `down.weight`: (n,) for a Linear.
        up_tail: Dimensions after (m, r) in `up.weight`, or after r if `up_transposed`.
        up_transposed: `up.weight` stores r × outputs (transposed convolutions).
        lookup: Rows are looked up (embeddings): no MACs, and `down.weight` stores inputs × r.
        routed: Each vector is multiplied by one block only; factors and bias are stacks too.

    >>> x = Matrix(name="", weight="weight", shape=(4, 6), m=4, n=6, down_row=(6,))
    >>> x.numel, x.factor_numel(r=2)
    (24, 20)
    """

    name: str
    weight: str
    shape: tuple[int, ...]
    m: int
    n: int
    blocks: int = 1
    bias: str | None = None
    start: int = 0
    dim: int = 0
    step: int = 1
    bias_start: int = 0
    dense: str | None = None
    transposed: bool = False
    down_row: tuple[int, ...] = ()
    up_tail: tuple[int, ...] = ()
    up_transposed: bool = False
    lookup: bool = False
    routed: bool = False

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
        return own_name(self.name, "down.weight")

    @property
    def up(self) -> str:
        """Name of the parameter U in the low-rank layer."""
        return own_name(self.name, "up.weight")

    @property
    def used_blocks(self) -> int:
        """Number of blocks that multiply one vector."""
        return 1 if self.routed else self.blocks

    @property
    def index(self) -> Index:
        """Index of this matrix in its dense parameter."""
        return _index(self.dim, self.start, self.shape[self.dim], self.step)

    @property
    def bias_index(self) -> Index:
        """Index of the matrix' part of the bias."""
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
            index = self.bias_index
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


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a dense parameter: a matrix that becomes two factors, or a slice that is copied under another name."""

    layer: str
    matrix: Matrix
    rank: int | None  # None: it is copied
    source: str  # the dense parameter
    index: Index  # of the piece in it
    targets: tuple[str, ...]  # V and U, or the copy

    @property
    def name(self) -> str:
        """Name of the matrix in a plan."""
        return own_name(self.layer, self.matrix.name)

    def factors(self, get: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """U (blocks, m, r) and V (blocks, r, n), given the low-rank parameters, or tensors of their shapes, by name."""
        down, up = self.targets
        return self.matrix.to_factors(get(down), get(up))


class FactorMap:
    """Which low-rank parameters each dense parameter of a model becomes, and conversion of any tensor of their shapes.

    All that changes between dense and low-rank goes through it: weights, optimizer state, shards, files.

    Args:
        matrices: All matrices of the layers that change: layer, matrix, and rank, or None if it is not factorized.

    Attributes:
        targets: Low-rank names by dense name. A single one means that the parameter is the same object in both forms.

    >>> x = Matrix(name="", weight="weight", bias="bias", shape=(4, 6), m=4, n=6, down_row=(6,))
    >>> FactorMap([("fc", x, 2)]).targets
    {'fc.weight': ('fc.down.weight', 'fc.up.weight'), 'fc.bias': ('fc.up.bias',)}
    """

    def __init__(self, matrices: Iterable[tuple[str, Matrix, int | None]]) -> None:
        self.parts: dict[str, list[Part]] = {}  # by dense name
        for layer, x, rank in matrices:
            pieces = [(x.weight, x.index, rank, (x.down, x.up) if rank else (x.dense or x.weight,))]
            if x.bias is not None:
                copy = own_name(x.name, "up.bias" if rank else "bias")
                pieces.append((x.bias, x.bias_index, None, (copy,)))
            for own, index, r, new in pieces:
                source, targets = own_name(layer, own), tuple(own_name(layer, name) for name in new)
                part = Part(layer=layer, matrix=x, rank=r, source=source, index=index, targets=targets)
                self.parts.setdefault(source, []).append(part)
        self.targets = {
            name: tuple(target for part in parts for target in part.targets)
            for name, parts in self.parts.items()
        }

    @property
    def replaced(self) -> dict[str, tuple[str, ...]]:
        """`targets` of the parameters that are not the same object in both forms."""
        return {name: targets for name, targets in self.targets.items() if len(targets) > 1}

    def split(
        self, name: str, value: Tensor, factor: Callable[[Part, Tensor], tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Low-rank names and tensors of one dense tensor.

        Args:
            factor: gives U (blocks, m, r) and V (blocks, r, n) of a matrix W (blocks, m, n).
        """
        for part in self.parts[name]:
            if part.rank is None:
                yield part.targets[0], value[part.index]
            else:
                x = part.matrix
                yield from zip(part.targets, x.from_factors(*factor(part, x.to_matrix(value))), strict=True)

    def join(
        self,
        name: str,
        get: Callable[[str], Tensor],
        product: Callable[[Part, Tensor, Tensor], Tensor],
        out: Tensor,
    ) -> Tensor:
        """Fill `out` with a dense tensor.

        Args:
            get: gives a low-rank tensor by its name.
            product: gives W (blocks, m, n) for U and V.
        """
        for part in self.parts[name]:
            if part.rank is None:
                piece = get(part.targets[0])
            else:
                piece = part.matrix.from_matrix(product(part, *part.factors(get)))
            out[part.index] = piece.to(out.dtype)
        return out

    def shape(self, name: str) -> torch.Size:
        """Shape of a dense parameter."""
        own = name.removeprefix(f"{self.parts[name][0].layer}.")
        shapes = [part.matrix.least_shape(own) for part in self.parts[name]]
        return torch.Size(map(max, zip(*shapes, strict=True)))


def product(part: Part, U: Tensor, V: Tensor) -> Tensor:
    """The matrix that two factors stand for, computed in fp32, or in fp64 for fp64 factors."""
    return at_least_fp32(U) @ at_least_fp32(V)


def _index(dim: int, start: int, length: int, step: int) -> Index:
    return (*[slice(None)] * dim, slice(start, start + (length - 1) * step + 1, step))


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert to fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()
