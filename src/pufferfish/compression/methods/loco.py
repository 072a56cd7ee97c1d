"""LoCo (Xie et al., 2024): gradients in 4 bits, compensated by a moving average of the rounding error in 8 bits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import MessageGenerator, StepContext, check_whole
from .int4 import Int4
from .twostage import even


@dataclass(frozen=True)
class LoCo(Int4):
    """`Int4` with an error feedback of one byte per element: h = g + e is sent, and e = β·e + (1 − β)·(h − sent).

    Because e + (1 − β)·(g − sent) is the same, e is 1 − β times the sum of all that was not sent: error feedback that
    responds slowly. e is rounded to 8 bits in blocks. The owners of shards keep the error of their own rounding in fp32.

    Args:
        block: Largest number of elements that share a scale of 4 bytes, a multiple of 8. Higher → fewer bytes, coarser.
        beta: Share of the old error in the new one, in [0, 1). 0: error feedback at full size.
        reset: Steps after which e becomes zero, so that errors of old gradients do not stay.

    >>> LoCo()
    LoCo(block=256, beta=0.8, reset=1024)
    """

    beta: float = 0.8
    reset: int = 1024

    kind = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < 1:
            raise ValueError(f"LoCo: beta={self.beta!r} is not in [0, 1)")
        check_whole(self, "reset")

    @property
    def in_units(self) -> tuple[str, ...]:
        return ("owner", "scale")

    def keeps_errors(self, ctx: StepContext) -> bool:
        return True

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, worker: int, size: int) -> Tensor | None:
        parts = [super().unsent(state, shape, worker, size)]
        if "e" in state and "scale" in state:
            e = _decoded(state["e"].reshape(1, -1), state["scale"].reshape(1, -1), self.block)
            parts.append(e.view(shape) / (1 - self.beta))
        known = [x for x in parts if x is not None]
        return sum(known[1:], known[0]) if known else None

    def compress(self, g: Tensor, ctx: StepContext) -> MessageGenerator:
        e: Tensor | None = None
        if "e" in ctx.state and "scale" in ctx.state:
            e = _decoded(ctx.state["e"], ctx.state["scale"], self.block)
            g += e
        mean, rest = yield from super().compress(g, ctx)
        assert rest is not None
        rest *= 1 - self.beta
        if e is not None:
            rest.add_(e, alpha=self.beta)
        if (ctx.step + 1) % self.reset == 0:
            rest.zero_()
        ctx.state["e"], ctx.state["scale"] = _encoded(rest, self.block)
        return mean, None


def _encoded(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Round x (b, d) to int8 in blocks: (b, d), and a scale for each block, (b, blocks)."""
    v = _blocks(x, block)
    scale = (v.abs().amax(2, keepdim=True) / 127).clamp_min(torch.finfo(x.dtype).tiny)
    codes = (v / scale).round_().to(torch.int8)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scale.squeeze(2)


def _decoded(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    return (_blocks(codes, block) * scale.unsqueeze(2)).flatten(1)[:, : codes.shape[1]]


def _blocks(x: Tensor, block: int) -> Tensor:
    """Cut x (b, d) into blocks of equal sizes: (b, blocks, size)."""
    many, size = even(x.shape[1], block)
    return torch.nn.functional.pad(x, (0, many * size - x.shape[1])).view(len(x), many, size)
