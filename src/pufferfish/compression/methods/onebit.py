"""1-bit SGD (Seide et al., 2014): a sign for each element and two numbers for each column."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..method import Gather, MessageGenerator, Method, StepContext
from .bits import pack, unpack


@dataclass(frozen=True)
class OneBitSGD(Method):
    """Replaces the elements ≥ 0 of each column by their mean, and those below 0 by theirs; signs and means are all-gathered.

    A matrix of one or two rows, where two numbers per column save nothing, is sent uncompressed.

    >>> OneBitSGD().fits((64, 3, 3, 3)), OneBitSGD().fits((2, 100))
    (True, False)
    """

    matrix = True
    exchanges = ("all_gather",)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape[0] > 2  # two numbers per column

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        m, n = M.shape[1:]
        spare = ctx.empty(M.shape, M.dtype)
        positive = M >= 0
        many = positive.sum(1, keepdim=True)
        above = torch.clamp(M, min=0, out=spare).sum(1, keepdim=True) / many.clamp_min(1)
        below = torch.clamp(M, max=0, out=spare).sum(1, keepdim=True) / (m - many).clamp_min(1)
        packed = pack(pad(positive.flatten(1), (0, -m * n % 8)), 1)
        M -= _decoded(packed, above, below, spare)
        everyone = yield Gather((packed, above, below))
        mean = ctx.empty(M.shape, M.dtype).zero_()
        for signs, a, b in everyone:
            mean += _decoded(signs, a, b, spare)
        return mean.div_(ctx.size), M


def _decoded(packed: Tensor, above: Tensor, below: Tensor, out: Tensor) -> Tensor:
    bits = unpack(packed, 1)[:, : out[0].numel()].view(out.shape)
    return out.copy_(bits).mul_(above - below).add_(below)  # faster than `where`
