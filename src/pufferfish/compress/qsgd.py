"""QSGD (Alistarh et al., 2017): elements rounded at random to a few levels, so that they are right on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import pack, unpack
from .method import Gather, Method, Scatter, Steps
from .turn import Turn


@dataclass(frozen=True)
class QSGD(Method):
    """In buckets v: ‖v‖₂ · sgn(vᵢ) · l/s, where s|vᵢ|/‖v‖₂ is rounded up to l with the probability of its fraction.

    ⌈log₂(2s + 1)⌉ bits an element and one norm a bucket. Shards are summed by their owners, which quantize the
    mean once more for the way back.

    Args:
        levels: s; lower → fewer bits, more noise. 7 makes 4 bits.
        bucket: elements that share a norm, a multiple of 8; more → fewer bytes, more noise.

    >>> QSGD().bits, QSGD(levels=1).bits, QSGD(levels=127).bits
    (4, 2, 8)
    """

    levels: int = 7
    bucket: int = 512

    kind = "unbiased"

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ValueError(f"QSGD: levels={self.levels!r} is not a whole number from 1 to 127")
        if self.bucket < 8 or self.bucket % 8:
            raise ValueError(f"QSGD: bucket={self.bucket!r} is not a multiple of 8")

    @property
    def bits(self) -> int:
        """On the wire, for each element."""
        return (2 * self.levels).bit_length()

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        sent = self._quantized(turn.shards(x, self.bucket), turn.own)
        received = yield Scatter(tuple(zip(*sent, strict=True)))
        mean = torch.stack([self._values(q, norm) for q, norm in received]).mean(0)
        averages = yield Gather(self._quantized(mean, turn.own))
        return turn.whole([self._values(q, norm) for q, norm in averages], x.shape[1]), None

    def _quantized(self, x: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """Packed levels and norms of the buckets in the last dimension."""
        v = x.unflatten(-1, (-1, self.bucket))
        norm = v.norm(dim=-1, keepdim=True)
        chance = torch.rand(v.shape, dtype=x.dtype, device=x.device, generator=stream)
        level = (v.abs() * (self.levels / norm.clamp_min(1e-30)) + chance).floor_().clamp_(max=self.levels)
        return pack((level * v.sign() + self.levels).flatten(-2), self.bits), norm.squeeze(-1)

    def _values(self, packed: Tensor, norm: Tensor) -> Tensor:
        level = unpack(packed, self.bits).to(norm.dtype).sub_(self.levels)
        values: Tensor = level.unflatten(-1, (-1, self.bucket)) * (norm / self.levels).unsqueeze(-1)
        return values.flatten(-2)
