"""Threshold quantization (Strom, 2015): ±τ for every element beyond τ; the rest waits in the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, Method, Steps
from ..turn import Turn


@dataclass(frozen=True)
class Threshold(Method):
    """τ·sgn(xᵢ) where |xᵢ| > τ, else nothing: each worker's own choice, all-gathered.

    An element sent is one integer, 2·index + sign. How many there are differs between workers, so all tell their
    count first and fill up to the largest. Two bits for every element would need no count, but could never be
    more than 16 times smaller; what is beyond a useful τ is rarer than that.

    Args:
        tau: τ, in the gradients' units as they are exchanged, loss scale included. Higher → fewer bytes. Gradients
            differ by orders of magnitude between models, so look at yours first: far too low a τ sends more
            bytes than no compression, and holds back what is larger.

    >>> Threshold(tau=0.01)
    Threshold(tau=0.01)
    """

    tau: float = 1e-3

    sparse = True
    exchanges = ("all_gather",)

    def __post_init__(self) -> None:
        if not 0 < self.tau < math.inf:
            raise ValueError(f"Threshold: tau={self.tau!r} is not a finite number > 0")

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        flat = x.view(-1)  # τ is the same for all b tensors
        size = torch.abs(flat, out=turn.empty(flat.shape, x.dtype))
        i = torch.gt(size, self.tau, out=turn.empty(flat.shape, torch.bool)).nonzero().squeeze(1)
        negative = flat[i] < 0
        counts = yield Gather((torch.tensor([len(i)], device=x.device),))
        lengths = torch.cat([n for (n,) in counts]).tolist()
        code = torch.zeros(
            max(lengths), dtype=torch.int32 if len(flat) < 2**30 else torch.int64, device=x.device
        )
        code[: len(i)] = 2 * i + negative
        everyone = yield Gather((code,))
        mean = size.zero_()
        for (theirs,), n in zip(everyone, lengths, strict=True):
            sign = 1 - 2 * (theirs[:n] & 1).to(x.dtype)
            mean.index_add_(0, theirs[:n] >> 1, sign, alpha=self.tau / turn.size)
        flat.index_add_(0, i, 1 - 2 * negative.to(x.dtype), alpha=-self.tau)
        return mean.view_as(x), x
