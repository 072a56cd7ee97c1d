"""Gradients averaged as they are, or in 16 bits: what every comparison starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Method, Steps, Sum
from ..turn import Turn


@dataclass(frozen=True)
class NoCompression(Method):
    """Plain averaging, in the gradients' own dtype.

    >>> NoCompression()
    NoCompression()
    """

    elementwise = True
    exchanges = ("all_reduce",)
    kind = "exact"

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        return _mean(x, turn, turn.dtype)


@dataclass(frozen=True)
class BFloat16(Method):
    """Averaged in bfloat16: half the bytes, the range of fp32, 8 bits of precision.

    >>> BFloat16()
    BFloat16()
    """

    elementwise = True
    exchanges = ("all_reduce",)
    kind = "rounding"

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        return _mean(x, turn, torch.bfloat16)


@dataclass(frozen=True)
class Float16(Method):
    """Averaged in float16: half the bytes, 11 bits of precision; 65,504 and more becomes infinite.

    >>> Float16()
    Float16()
    """

    elementwise = True
    exchanges = ("all_reduce",)
    kind = "rounding"

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        return _mean(x, turn, torch.float16)


def _mean(x: Tensor, turn: Turn, dtype: torch.dtype) -> Steps:
    if turn.size > 1:
        x /= turn.size  # before the sum, which may overflow in 16 bits
    sent = x if dtype == x.dtype else turn.empty(x.shape, dtype).copy_(x)
    return (yield Sum(sent)), None
