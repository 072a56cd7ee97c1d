"""Block-random-k: a run of neighbouring elements from a random start; one integer says which ones they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, Steps, Sum, count
from ..turn import Turn
from .sparse import RandomK


@dataclass(frozen=True)
class BlockRandomK(RandomK):
    """k consecutive elements from a start drawn uniformly in every step; behind the last comes the first.

    The wrap-around gives every element the same chance k/d. Reading and writing a run is cheaper than picking
    single elements; neighbours are alike, so a run tells less about the gradient.

    Args:
        k: a share (0.01) of each tensor's elements, or a number of them (100).
        coordinates: "shared": the same run on all workers, so that an all-reduce of the values is enough;
            "own": each worker its own, all-gathered with its start.
        scale: multiply by d/k, which makes it unbiased, to be used without a memory.

    >>> BlockRandomK(k=100, coordinates="own")
    BlockRandomK(k=100, coordinates='own', scale=False)
    """

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        b, d = x.shape
        k = count(self.k, d)
        stream = turn.shared if self.coordinates == "shared" else turn.own
        start = torch.randint(d, (b, 1), device=x.device, generator=stream)
        run = torch.arange(k, device=x.device)
        i = (start + run) % d
        if self.scale:
            x *= d / k
        mean = turn.empty(x.shape, x.dtype).zero_()
        if self.coordinates == "shared":
            total = yield Sum(x.gather(1, i))
            mean.scatter_(1, i, total)
        else:
            everyone = yield Gather((x.gather(1, i), start.int() if d < 2**31 else start))
            for values, begin in everyone:
                mean.scatter_add_(1, (begin + run) % d, values)
        return mean.div_(turn.size), x.scatter_(1, i, 0)
