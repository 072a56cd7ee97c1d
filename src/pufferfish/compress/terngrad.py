"""TernGrad (Wen et al., 2017): −s, 0 or s for every element, right on average."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import pack, unpack
from .method import Gather, Method, Scatter, Steps
from .turn import Turn


@dataclass(frozen=True)
class TernGrad(Method):
    """s·sgn(gᵢ)·bᵢ with bᵢ = 1 by chance |gᵢ|/s, where s is the largest |gᵢ| of the tensor on any worker.

    With one s for all, sums are whole numbers from −W to W. Owners of shards add 2-bit numbers up and send the exact
    sums back in ⌈log₂(2W + 1)⌉ bits: 2 + 5 bits an element for 8 workers, where an all-reduce of bytes, which can
    hold no more than 127 workers, would move 8 + 8.

    Args:
        clip: elements are clipped at so many σ of their tensor first, which makes s, and with it the noise, smaller.
            What is cut off is lost; None: nothing is, and it is unbiased. σ is taken about zero: about the mean,
            a tensor of equal elements would become zero.

    >>> TernGrad(clip=None).kind
    'unbiased'
    """

    clip: float | None = 2.5

    @property
    def kind(self) -> str:
        return "unbiased" if self.clip is None else "clipped"

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"TernGrad: clip={self.clip!r} is neither None nor a finite number > 0")

    def compress(self, g: Tensor, turn: Turn) -> Steps:
        if self.clip is not None:
            bound = self.clip * g.square().mean(1, keepdim=True).sqrt()
            g = g.clamp(-bound, bound)
        sizes = yield Gather((g.abs().amax(1, keepdim=True),))
        s = torch.stack([size for (size,) in sizes]).amax(0)
        chance = torch.rand(g.shape, dtype=g.dtype, device=g.device, generator=turn.own)
        ternary = g.sign() * (chance * s < g.abs())
        received = yield Scatter(tuple((pack(t, 2),) for t in turn.shards(ternary + 1, multiple=8)))
        total = torch.stack([unpack(t, 2) for (t,) in received]).sum(0, dtype=torch.int16)  # of 0 to 2
        bits = (2 * turn.size).bit_length()
        totals = yield Gather((pack(total, bits) if bits <= 8 else total,))
        sums = turn.whole([unpack(t, bits) if bits <= 8 else t for (t,) in totals], g.shape[1])
        return (sums.to(g.dtype) - turn.size) * (s / turn.size), None
