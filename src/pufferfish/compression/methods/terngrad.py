"""TernGrad (Wen et al., 2017): −s, 0 or s for every element, without bias."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, MessageGenerator, Method, Scatter, StepContext
from .bits import pack, unpack
from .qsgd import dithered


@dataclass(frozen=True)
class TernGrad(Method):
    """Sends s·sgn(gᵢ)·bᵢ with bᵢ = 1 with probability `|gᵢ|/s`, where s is the largest `|gᵢ|` of the tensor on any worker.

    With one s for all workers, sums are integers from −W to W. Owners of shards add 2-bit numbers and send the exact
    sums back in ⌈log₂(2W + 1)⌉ bits: 2 + 5 bits per element for 8 workers, where an all-reduce of bytes, limited to 127
    workers, would send 8 + 8.

    Args:
        clip: Elements are clipped at this multiple of their tensor's σ first, which reduces s and the noise. The clipped part
            is lost. None: no clipping, unbiased. σ is taken about zero: about the mean, a tensor of equal elements would
            become zero.

    >>> TernGrad(clip=None).kind
    'unbiased'
    """

    clip: float | None = 2.5

    exchanges = ("all_to_all",)

    @property
    def kind(self) -> str:
        return "unbiased" if self.clip is None else "clipped"

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"TernGrad: clip={self.clip!r} is neither None nor a finite number > 0")

    def compress(self, g: Tensor, ctx: StepContext) -> MessageGenerator:
        d = g.shape[1]
        if self.clip is not None:
            bound = self.clip * d**-0.5 * torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g.clamp_(-bound, bound)
        sizes = yield Gather((torch.maximum(g.amax(1, keepdim=True), -g.amin(1, keepdim=True)),))
        s = torch.stack([size for (size,) in sizes]).amax(0)
        spare = ctx.empty(g.shape, g.dtype)
        ternary = dithered(g, 1 / s.clamp_min(1e-30), 1, spare, ctx)
        received = yield Scatter(tuple((pack(t, 2),) for t in ctx.shards(ternary, multiple=8)))
        bits = (2 * ctx.size).bit_length()
        total = unpack(received[0][0], 2).to(torch.uint8 if bits <= 8 else torch.int16)  # of 0 to 2
        for (theirs,) in received[1:]:
            total += unpack(theirs, 2)
        totals = yield Gather((pack(total, bits) if bits <= 8 else total,))
        sums = ctx.whole([unpack(t, bits) if bits <= 8 else t for (t,) in totals], d)
        return spare.copy_(sums).sub_(ctx.size).mul_(s / ctx.size), None
