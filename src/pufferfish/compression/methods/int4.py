"""4 and 2 bits per element, in blocks that share a scale or two levels: for the averages of local steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import StepContext
from .bits import pack, unpack
from .blocks import Blocks


@dataclass(frozen=True)
class Int4(Blocks):
    """Rounds each block to integers from −7 to 7, times a scale: 7.76 times fewer bytes than fp32.

    Shards are averaged by their owners (all-to-all), rounded again and sent to all (all-gather). The error of the first
    rounding is each worker's error feedback, that of the second is kept at the owner.

    Args:
        block: Largest number of elements that share a scale of 4 bytes, a multiple of 8. Higher → fewer bytes, coarser.

    >>> Int4()
    Int4(block=256)
    """

    multiple = 8  # elements are packed into bytes
    largest = 7

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        q, scale = self.scaled(x, spare)
        return pack(ctx.empty(x.shape, torch.uint8).copy_(q.round_().add_(7)), 4), scale

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        packed, scale = sent
        out.copy_(unpack(packed, 4).sub_(7).view(torch.int8))
        out.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1))
        return out


@dataclass(frozen=True)
class Int2(Blocks):
    """Sends a sign and one of two magnitudes for each element: 15.1 times fewer bytes than fp32.

    The magnitudes of a block are the means of those below its root mean square and of the others, so that the error is never
    longer than the block. A zero counts as +. Shards are averaged by their owners and encoded again, as in `Int4`.

    Args:
        block: Largest number of elements that share two magnitudes of 2 bytes, a multiple of 8. Higher → fewer bytes,
            coarser.

    >>> Int2(block=64)
    Int2(block=64)
    """

    multiple = 8

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        v = self.cut(x)
        large, low, high = two_levels(torch.abs(v, out=spare.view(v.shape)), square=True)
        code = torch.lt(v, 0, out=ctx.empty(v.shape, torch.bool)).view(torch.uint8).mul_(2).add_(large)
        return pack(code.view(x.shape), 2), torch.cat([low, high], -1).bfloat16()

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        packed, levels = sent
        low, high = levels.to(out.dtype).split(1, -1)
        code = unpack(packed, 2).unflatten(-1, (levels.shape[-2], -1))
        signed_levels(code, low, high, out.view(code.shape))
        return out


def two_levels(size: Tensor, *, square: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split magnitudes (…, n): which are large, the mean of the small and that of the large, (…, 1) each. Overwrites `size`.

    Large are those not below the root mean square, or, if not `square`, below the mean weighted by the magnitudes.

    >>> two_levels(torch.tensor([1.0, 3.0, 0.0, 5.0]), square=False)
    (tensor([False, False, False,  True]), tensor([1.3333]), tensor([5.]))
    """
    n = size.shape[-1]
    norm = torch.linalg.vector_norm(size, dim=-1, keepdim=True)
    total = size.sum(-1, keepdim=True)
    split = norm * n**-0.5 if square else norm * (norm / total.clamp_min(torch.finfo(size.dtype).tiny))
    large = size >= torch.minimum(split, size.amax(-1, keepdim=True))  # never none, however it was rounded
    chosen = large.to(size.dtype)  # sums and products of bools are slow
    many = chosen.sum(-1, keepdim=True)
    high = chosen.mul_(size).sum(-1, keepdim=True) / many
    low = size.sub_(chosen).sum(-1, keepdim=True) / (n - many).clamp_min(1)
    return large, low, high


def signed_levels(code: Tensor, low: Tensor, high: Tensor, out: Tensor) -> Tensor:
    """Decode 0, 1, 2, 3 to low, high, −low, −high.

    >>> signed_levels(torch.arange(4).to(torch.uint8), torch.tensor(1.0), torch.tensor(3.0), torch.empty(4))
    tensor([ 1.,  3., -1., -3.])
    """
    out.copy_(code & 1).mul_(high - low).add_(low)
    return out.mul_(1 - (code & 2).view(torch.int8))
