"""1-bit SGD (Seide et al., 2014): a sign for each element and two numbers for each column."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bits import pack, unpack
from .method import Gather, Method, Steps
from .turn import Turn


@dataclass(frozen=True)
class OneBitSGD(Method):
    """In each column of the matrix, elements ≥ 0 become their mean, and those below 0 theirs. All-gathered.

    A matrix of one or two rows, where two numbers a column save nothing, travels as it is.

    >>> OneBitSGD().fits((64, 3, 3, 3)), OneBitSGD().fits((2, 100))
    (True, False)
    """

    matrix = True

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape[0] > 2  # two numbers a column

    def compress(self, M: Tensor, turn: Turn) -> Steps:
        positive = M >= 0
        many = positive.sum(1, keepdim=True)
        above = M.clamp_min(0).sum(1, keepdim=True) / many.clamp_min(1)
        below = M.clamp_max(0).sum(1, keepdim=True) / (M.shape[1] - many).clamp_min(1)
        flat = positive.flatten(1)
        everyone = yield Gather((pack(pad(flat, (0, -flat.shape[1] % 8)), 1), above, below))
        mean = torch.zeros_like(M)
        for signs, a, b in everyone:
            mean += a.where(unpack(signs, 1)[:, : flat.shape[1]].view_as(M).bool(), b)
        return mean.div_(turn.size), M - above.where(positive, below)
