"""ATOMO (Wang et al., 2018), spectral: a few singular triples, sampled without bias."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, MessageGenerator, StepContext
from .powersgd import TwoFactors


@dataclass(frozen=True)
class Atomo(TwoFactors):
    """M = Σ σᵢ uᵢ vᵢᵀ; term i is sent with probability pᵢ, divided by pᵢ, all-gathered.

    pᵢ = min(1, c·σᵢ) with Σ pᵢ = r, which minimises the variance. Systematic sampling: one random number u draws all terms;
    term i is taken if one of u, u + 1, … falls into the i-th of consecutive intervals of lengths pᵢ. Exactly r terms
    are taken, so that messages have one size. A matrix of lower rank is padded with zeros.

    An SVD of every matrix in every step is slow: this method is for comparison.

    Args:
        rank: r, the number of terms. Lower → fewer bytes, more noise. A matrix that does not become smaller,
            r (m + n) ≥ m n, is sent uncompressed.

    >>> Atomo(rank=2).fits((64, 3, 3, 3)), Atomo(rank=2).fits((2, 100))
    (True, False)
    """

    rank: int = 3

    exchanges = ("all_gather",)
    kind = "unbiased"

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        U, sigma, Vt = torch.linalg.svd(M, full_matrices=False)
        p = probabilities(sigma.double(), self.rank)
        ends = p.cumsum(-1)
        u = torch.rand(len(M), 1, dtype=p.dtype, device=M.device, generator=ctx.own_rng)
        marks = u + torch.arange(self.rank, device=M.device)
        i = torch.searchsorted(ends, marks, right=True).clamp_(max=p.shape[1] - 1)
        weight = (sigma / p.clamp_min(1e-300)).gather(1, i)
        weight *= marks < ends[:, -1:]  # no term beyond the last interval
        left = U.gather(2, i[:, None].expand(-1, M.shape[1], -1)) * weight[:, None].to(M.dtype)
        right = Vt.gather(1, i[..., None].expand(-1, -1, M.shape[2]))
        lefts, rights = zip(*(yield Gather((left, right))), strict=True)
        return torch.cat(lefts, 2) @ torch.cat(rights, 1) / ctx.size, None


def probabilities(sigma: Tensor, r: int) -> Tensor:
    """min(1, c·σᵢ) with the sum r, or the number of σᵢ > 0 if that is less; σ is in descending order.

    >>> probabilities(torch.tensor([[6.0, 2.0, 1.0, 1.0]]), 2)
    tensor([[1.0000, 0.5000, 0.2500, 0.2500]])
    """
    rest = sigma.flip(-1).cumsum(-1).flip(-1)  # σᵢ + σᵢ₊₁ + …
    room = r - torch.arange(
        sigma.shape[-1], device=sigma.device
    )  # their sum of probabilities if all before are 1
    first = (sigma * room <= rest).int().argmax(-1, keepdim=True)  # the first below 1
    c = room.expand_as(rest).gather(-1, first) / rest.gather(-1, first).clamp_min(1e-300)
    return (c * sigma).clamp_max(1)
