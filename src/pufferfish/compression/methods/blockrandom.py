"""Block-random-k: consecutive elements from a random start, so that one integer gives all indices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, MessageGenerator, StepContext, Sum, count
from .sparse import RandomK


@dataclass(frozen=True)
class BlockRandomK(RandomK):
    """Sends k consecutive elements from a start drawn uniformly in every step, with wrap-around.

    The wrap-around gives every element the same probability k/d. Reading and writing consecutive elements is cheaper than
    single ones; but neighbours are similar, so they carry less information about the gradient.

    Args:
        k: A share (0.01) of each tensor's elements, or a number of them (100).
        coordinates: "shared": the same elements on all workers, so that an all-reduce of the values is enough;
            "own": each worker draws its own start, all-gathered with the values.
        scale: Multiply by d/k, which makes it unbiased, without error feedback.

    >>> BlockRandomK(k=100, coordinates="own")
    BlockRandomK(k=100, coordinates='own', scale=False)
    """

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        b, d = x.shape
        k = count(self.k, d)
        rng = ctx.shared_rng if self.coordinates == "shared" else ctx.own_rng
        start = torch.randint(d, (b, 1), device=x.device, generator=rng)
        run = torch.arange(k, device=x.device)
        i = (start + run) % d
        if self.scale:
            x *= d / k
        mean = ctx.empty(x.shape, x.dtype).zero_()
        if self.coordinates == "shared":
            total = yield Sum(x.gather(1, i))
            mean.scatter_(1, i, total)
        else:
            everyone = yield Gather((x.gather(1, i), start.int() if d < 2**31 else start))
            for values, begin in everyone:
                mean.scatter_add_(1, (begin + run) % d, values)
        return mean.div_(ctx.size), x.scatter_(1, i, 0)
