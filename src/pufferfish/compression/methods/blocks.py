"""8 bits per element, in blocks that share a scale: int8, or fp8 with 4 exponent and 3 mantissa bits."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..method import StepContext, check_whole
from .twostage import TwoStage, even

#: Value of every byte.
_FP8 = torch.arange(256, device="cpu").to(torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Blocks(TwoStage):
    """Common base of methods that cut a shard into blocks of equal sizes."""

    block: int = 256

    multiple: ClassVar[int] = 1  # what the size of a block is a multiple of
    largest: ClassVar[int]  # value of a block's largest element

    def __post_init__(self) -> None:
        check_whole(self, "block", multiple=self.multiple)

    def shard(self, d: int, shards: int) -> int:
        many, size = even(-(-d // shards), self.block, self.multiple)
        return many * size

    def cut(self, x: Tensor) -> Tensor:
        """x (…, s) as blocks (…, blocks, size)."""
        return x.view(*x.shape[:-1], *even(x.shape[-1], self.block, self.multiple))

    def scaled(self, x: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """x divided by a scale for each block, so that its largest element becomes `largest`; and the scales."""
        v = self.cut(x)
        size = torch.maximum(v.amax(-1, keepdim=True), -v.amin(-1, keepdim=True))
        scale = (size / self.largest).clamp_min(torch.finfo(x.dtype).tiny)
        return torch.div(v, scale, out=spare.view(v.shape)).view(x.shape), scale.squeeze(-1)


@dataclass(frozen=True)
class _Bytes(Blocks):
    number: ClassVar[torch.dtype]

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        q, scale = self.scaled(x, spare)
        if not self.number.is_floating_point:
            q.round_()
        return ctx.empty(x.shape, self.number).copy_(q).view(torch.uint8), scale

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        q, scale = sent
        if self.number.is_floating_point and q.device.type == "cpu":  # torch converts fp8 slowly there
            torch.index_select(_FP8.to(out.dtype), 0, q.reshape(-1).int(), out=out.view(-1))
        else:
            out.copy_(q.view(self.number))
        out.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1))
        return out


@dataclass(frozen=True)
class BlockInt8(_Bytes):
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
class BlockFP8(_Bytes):
    """`BlockInt8` in fp8 (e4m3): finer for a block's small elements, coarser for its large ones.

    Args:
        block: Largest number of elements that share a scale of 4 bytes. Higher → fewer bytes, coarser.

    >>> BlockFP8(block=128)
    BlockFP8(block=128)
    """

    number = torch.float8_e4m3fn
    largest = 448
