"""8 bits an element, in blocks that share a scale: whole numbers, or floats of 4 bits of range and 3 of precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .method import Gather, Method, Scatter, Steps
from .turn import Turn


@dataclass(frozen=True)
class _Blocks(Method):
    block: int = 256

    number: ClassVar[torch.dtype]
    largest: ClassVar[int]  # a block's largest element becomes this

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"{type(self).__name__}: block={self.block!r} is not a whole number ≥ 1")

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        d = x.shape[1]
        sent = self._rounded(turn.shards(x, self.block))
        received = yield Scatter(tuple(zip(*sent, strict=True)))
        mean = torch.stack([self._values(q, scale) for q, scale in received]).mean(0)
        mean += turn.state.get("owner", 0)
        back = self._rounded(mean)
        turn.state["owner"] = mean - self._values(*back)
        averages = yield Gather(back)
        own = turn.whole(self._values(*sent).unbind(), d)
        return turn.whole([self._values(q, scale) for q, scale in averages], d), x - own

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes, and the scales of the blocks in the last dimension."""
        v = x.unflatten(-1, (-1, self.block))
        scale = (v.abs().amax(-1, keepdim=True) / self.largest).clamp_min(torch.finfo(x.dtype).tiny)
        q = v / scale
        if not self.number.is_floating_point:
            q.round_()
        return q.to(self.number).view(torch.uint8).flatten(-2), scale.squeeze(-1)

    def _values(self, q: Tensor, scale: Tensor) -> Tensor:
        numbers = q.view(self.number).to(scale.dtype).unflatten(-1, (-1, self.block))
        return torch.flatten(numbers * scale.unsqueeze(-1), -2)


@dataclass(frozen=True)
class BlockInt8(_Blocks):
    """Each block rounded to whole numbers from −127 to 127, times a scale: 3.94 times fewer bytes than fp32.

    Shards are averaged by their owners (all-to-all), rounded again, and sent to all (all-gather). What the first
    rounding loses waits in each worker's memory, what the second loses in another at the owner.

    Args:
        block: elements that share a scale of 4 bytes. More → fewer bytes, coarser.

    >>> BlockInt8()
    BlockInt8(block=256)
    """

    number = torch.int8
    largest = 127


@dataclass(frozen=True)
class BlockFP8(_Blocks):
    """As `BlockInt8`, in fp8 (e4m3): finer for a block's small elements, coarser for its large ones.

    Args:
        block: elements that share a scale of 4 bytes. More → fewer bytes, coarser.

    >>> BlockFP8(block=128)
    BlockFP8(block=128)
    """

    number = torch.float8_e4m3fn
    largest = 448
