"""Gradients averaged uncompressed or in 16 bits: the baselines of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..method import MessageGenerator, Method, StepContext, Sum


@dataclass(frozen=True)
class _Average(Method):
    """All-reduce of the gradients divided by the number of workers, in one dtype."""

    dtype: ClassVar[torch.dtype | None] = None  # None: that of the gradients

    layout = "row"
    exchanges = ("all_reduce",)
    kind = "rounding"

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        dtype = self.dtype or ctx.dtype
        if ctx.size > 1:
            x /= ctx.size  # before the sum, which may overflow in 16 bits
        sent = x if dtype == x.dtype else ctx.empty(x.shape, dtype).copy_(x)
        return (yield Sum(sent)), None


@dataclass(frozen=True)
class NoCompression(_Average):
    """Averages in the gradients' own dtype.

    >>> NoCompression()
    NoCompression()
    """

    kind = "exact"


@dataclass(frozen=True)
class BFloat16(_Average):
    """Averages in bfloat16: half the bytes of fp32, its range, 8 bits of precision.

    >>> BFloat16()
    BFloat16()
    """

    dtype = torch.bfloat16


@dataclass(frozen=True)
class Float16(_Average):
    """Averages in float16: half the bytes of fp32, 11 bits of precision; 65,504 and more becomes infinite.

    >>> Float16()
    Float16()
    """

    dtype = torch.float16
