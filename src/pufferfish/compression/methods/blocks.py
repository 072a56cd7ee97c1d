"""8 bits per element, in blocks that share a scale: int8, or fp8 with 4 exponent and 3 mantissa bits."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..method import StepContext
from .twostage import TwoStage, even

#: Value of every byte.
_FP8 = torch.arange(256, device="cpu").to(torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class _Blocks(TwoStage):
    block: int = 256

    number: ClassVar[torch.dtype]
    largest: ClassVar[int]  # value of a block's largest element

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"{type(self).__name__}: block={self.block!r} is not an integer ≥ 1")

    def shard(self, d: int, shards: int) -> int:
        many, size = even(-(-d // shards), self.block)
        return many * size

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        v = x.unflatten(-1, even(x.shape[-1], self.block))
        size = torch.maximum(v.amax(-1, keepdim=True), -v.amin(-1, keepdim=True))
        scale = (size / self.largest).clamp_min(torch.finfo(x.dtype).tiny)
        q = torch.div(v, scale, out=spare.view(v.shape))
        if not self.number.is_floating_point:
            q.round_()
        numbers = ctx.empty(x.shape, self.number).copy_(q.view(x.shape))
        return numbers.view(torch.uint8), scale.squeeze(-1)

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        q, scale = sent
        if self.number.is_floating_point and q.device.type == "cpu":  # torch converts fp8 slowly there
            torch.index_select(_FP8.to(out.dtype), 0, q.reshape(-1).int(), out=out.view(-1))
        else:
            out.copy_(q.view(self.number))
        out.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1))
        return out


@dataclass(frozen=True)
class BlockInt8(_Blocks):
    """Rounds each block to integers from −127 to 127, times a scale: 3.94 times fewer bytes than fp32.

    Shards are averaged by their owners (all-to-all), rounded again and sent to all (all-gather). The error of the first
    rounding is each worker's error feedback, that of the second is kept at the owner.

    Args:
        block: Largest number of elements that share a scale of 4 bytes. Higher → fewer bytes, coarser.

    >>> BlockInt8()
    BlockInt8(block=256)
    """

    number = torch.int8
    largest = 127


@dataclass(frozen=True)
class BlockFP8(_Blocks):
    """`BlockInt8` in fp8 (e4m3): finer for a block's small elements, coarser for its large ones.

    Args:
        block: Largest number of elements that share a scale of 4 bytes. Higher → fewer bytes, coarser.

    >>> BlockFP8(block=128)
    BlockFP8(block=128)
    """

    number = torch.float8_e4m3fn
    largest = 448
