"""Threshold quantization (Strom, 2015): ±τ for every element beyond τ; the rest is kept as error feedback."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, MessageGenerator, Method, StepContext


@dataclass(frozen=True)
class Threshold(Method):
    """Sends τ·sgn(xᵢ) where `|xᵢ| > τ`, at indices of each worker's own, all-gathered.

    An element is sent as one integer, 2·index + sign. The number of elements differs between workers, so the counts are gathered
    first and messages are padded to the largest. Two bits for every element would need no counts, but compress at most
    16 times; elements beyond a useful τ are rarer than that.

    Args:
        tau: τ, in the units of the gradients, loss scale included. Higher → fewer bytes. Gradients differ by orders of
            magnitude between models, so inspect yours first: with too low a τ more bytes are sent than without
            compression, and large elements are delayed.

    >>> Threshold(tau=0.01)
    Threshold(tau=0.01)
    """

    tau: float = 1e-3

    sparse = True
    exchanges = ("all_gather",)

    def __post_init__(self) -> None:
        if not 0 < self.tau < math.inf:
            raise ValueError(f"Threshold: tau={self.tau!r} is not a finite number > 0")

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        flat = x.view(-1)  # τ is the same for all b tensors
        size = torch.abs(flat, out=ctx.empty(flat.shape, x.dtype))
        i = torch.gt(size, self.tau, out=ctx.empty(flat.shape, torch.bool)).nonzero().squeeze(1)
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
            mean.index_add_(0, theirs[:n] >> 1, sign, alpha=self.tau / ctx.size)
        flat.index_add_(0, i, 1 - 2 * negative.to(x.dtype), alpha=-self.tau)
        return mean.view_as(x), x
