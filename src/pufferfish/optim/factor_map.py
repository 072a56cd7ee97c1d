"""What becomes of a layer's parameters: which low-rank ones a dense one turns into, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers import Matrix


@dataclass
class Change:
    """One layer's parameters, dense and low-rank, by their names in the layer."""

    layer: str
    matrices: list[Matrix]
    ranks: Mapping[str, int]
    dense: dict[str, Tensor]
    low_rank: dict[str, Tensor]

    @property
    def parts(self) -> dict[str, list[str]]:
        """Dense parameter → the low-rank parameters that it becomes; one means that it is only renamed."""
        parts: dict[str, list[str]] = {}
        for x in self.matrices:
            factorized = x.name in self.ranks
            if factorized:
                parts.setdefault(x.weight, []).extend((x.down, x.up))
            for source, _, target in x.moves(factorized):
                parts.setdefault(source, []).append(target)
        return parts

    def assemble(
        self, name: str, whole: Tensor, made: Callable[[Matrix], Tensor], moved: Callable[[str], Tensor]
    ) -> Tensor:
        """Fill a dense tensor from its parts: `made` gives W (blocks, m, n), `moved` a slice by its new name."""
        for x in self.matrices:
            factorized = x.name in self.ranks
            if factorized and x.weight == name:
                whole[x.rows] = x.roll(made(x)).to(whole.dtype)
            for source, rows, target in x.moves(factorized):
                if source == name:
                    whole[rows] = moved(target).to(whole.dtype)
        return whole


def multiplied(x: Matrix, down: Tensor, up: Tensor) -> Tensor:
    """W = U V in fp32 or better."""
    U, V = (f.double() if f.dtype == torch.float64 else f.float() for f in x.unfold(down, up))
    return U @ V
