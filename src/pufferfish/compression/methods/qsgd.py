"""QSGD (Alistarh et al., 2017): elements rounded at random to a few levels, without bias."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import StepContext, check_whole
from .bits import pack, unpack
from .twostage import TwoStage, even


@dataclass(frozen=True)
class QSGD(TwoStage):
    """Quantizes buckets v to ‖v‖₂ · l/s, where s·vᵢ/‖v‖₂ is rounded up to l with the probability of its fraction, else down.

    A message has ⌈log₂(2s + 1)⌉ bits per element and one norm per bucket. Shards are summed by their owners, which
    quantize the mean again before they send it.

    Args:
        levels: s; lower → fewer bits, more noise. 7 takes 4 bits.
        bucket: Largest number of elements that share a norm, a multiple of 8; higher → fewer bytes, more noise. The
            buckets of a shard have equal sizes.

    >>> QSGD().bits, QSGD(levels=1).bits, QSGD(levels=127).bits
    (4, 2, 8)
    """

    levels: int = 7
    bucket: int = 512

    kind = "unbiased"

    def __post_init__(self) -> None:
        check_whole(self, "levels", most=127)
        check_whole(self, "bucket", multiple=8)

    @property
    def bits(self) -> int:
        """Bits per element."""
        return (2 * self.levels).bit_length()

    def shard(self, d: int, shards: int) -> int:
        many, size = even(-(-d // shards), self.bucket, multiple=8)
        return many * size

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        v = x.unflatten(-1, even(x.shape[-1], self.bucket, multiple=8))
        norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        level = dithered(v, self.levels / norm.clamp_min(1e-30), self.levels, spare.view(v.shape), ctx)
        return pack(level.flatten(-2), self.bits), norm.squeeze(-1)

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        packed, norm = sent
        out.copy_(unpack(packed, self.bits).sub_(self.levels).view(torch.int8))
        out.unflatten(-1, (norm.shape[-1], -1)).mul_((norm / self.levels).unsqueeze(-1))
        return out


def dithered(x: Tensor, scale: Tensor, most: int, spare: Tensor, ctx: StepContext) -> Tensor:
    """Round x·scale, in [−most, most], up with the probability of its fraction, else down; add `most`, as uint8."""
    level = spare.uniform_(most, most + 1, generator=ctx.own_rng).addcmul_(x, scale)
    return ctx.empty(x.shape, torch.uint8).copy_(level).clamp_(max=2 * most)
