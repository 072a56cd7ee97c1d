"""ATOMO (Wang et al., 2018), spectral: a few singular triples, drawn so that they are right on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, Method, Steps
from ..turn import Turn


@dataclass(frozen=True)
class Atomo(Method):
    """M = Σ σᵢ uᵢ vᵢᵀ; term i is sent with chance pᵢ, divided by pᵢ. All-gathered.

    pᵢ = min(1, c·σᵢ) with Σ pᵢ = r, which makes the variance least. One random number draws them all: i is taken
    where u, u + 1, … falls into the i-th of intervals of lengths pᵢ laid end to end. Each chance is then
    pᵢ, and the terms are always r, so that messages have one size. A matrix of lower rank fills up with zeros.

    An SVD of every matrix in every step is slow: this is for comparison.

    Args:
        rank: r, the number of terms. Lower → fewer bytes, more noise. A matrix that gets no smaller,
            r (m + n) ≥ m n, travels as it is.

    >>> Atomo(rank=2).fits((64, 3, 3, 3)), Atomo(rank=2).fits((2, 100))
    (True, False)
    """

    rank: int = 3

    matrix = True
    exchanges = ("all_gather",)
    kind = "unbiased"

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"Atomo: rank={self.rank!r} is not a whole number ≥ 1")

    def fits(self, shape: tuple[int, ...]) -> bool:
        m, n = shape[0], torch.Size(shape[1:]).numel()
        return self.rank * (m + n) < m * n

    def compress(self, M: Tensor, turn: Turn) -> Steps:
        U, sigma, Vt = torch.linalg.svd(M, full_matrices=False)
        p = chances(sigma.double(), self.rank)
        ends = p.cumsum(-1)
        u = torch.rand(len(M), 1, dtype=p.dtype, device=M.device, generator=turn.own)
        marks = u + torch.arange(self.rank, device=M.device)
        i = torch.searchsorted(ends, marks, right=True).clamp_(max=p.shape[1] - 1)
        weight = (sigma / p.clamp_min(1e-300)).gather(1, i)
        weight *= marks < ends[:, -1:]  # beyond the last end there is nothing
        left = U.gather(2, i[:, None].expand(-1, M.shape[1], -1)) * weight[:, None].to(M.dtype)
        right = Vt.gather(1, i[..., None].expand(-1, -1, M.shape[2]))
        lefts, rights = zip(*(yield Gather((left, right))), strict=True)
        return torch.cat(lefts, 2) @ torch.cat(rights, 1) / turn.size, None


def chances(sigma: Tensor, r: int) -> Tensor:
    """min(1, c·σᵢ) that add up to r, or to the number of σᵢ > 0 where that is less; σ falls from left to right.

    >>> chances(torch.tensor([[6.0, 2.0, 1.0, 1.0]]), 2)
    tensor([[1.0000, 0.5000, 0.2500, 0.2500]])
    """
    rest = sigma.flip(-1).cumsum(-1).flip(-1)  # σᵢ + σᵢ₊₁ + …
    room = r - torch.arange(sigma.shape[-1], device=sigma.device)  # for them, when all before are certain
    first = (sigma * room <= rest).int().argmax(-1, keepdim=True)  # the first that is not
    c = room.expand_as(rest).gather(-1, first) / rest.gather(-1, first).clamp_min(1e-300)
    return (c * sigma).clamp_max(1)
