"""Alternating PowerSGD (ACP-SGD, Zhang et al., 2023): half a power iteration a step, so one message a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Method, Steps, Sum, Together
from ..turn import Turn
from .orthonormal import orthonormal


@dataclass(frozen=True)
class AlternatingPowerSGD(Method):
    """M ≈ P Qᵀ of rank r, one factor a step: the other is that of the step before, orthonormalised.

    Even steps: P = mean M Q, an all-reduce of r·m numbers. Odd steps: Q = mean Mᵀ P, of r·n. All apply P Qᵀ, and
    each worker keeps what the common directions leave of its own matrix, M − M Q Qᵀ or M − P Pᵀ M.

    Args:
        rank: lower → fewer bytes. A matrix that gets no smaller in two steps, r (m + n) ≥ m n, travels as it is.

    >>> AlternatingPowerSGD(rank=2).fits((64, 3, 3, 3)), AlternatingPowerSGD(rank=2).fits((2, 100))
    (True, False)
    """

    rank: int = 4

    matrix = True
    exchanges = ("all_reduce",)
    shared_state = ("P", "Q")

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"AlternatingPowerSGD: rank={self.rank!r} is not a whole number ≥ 1")

    def fits(self, shape: tuple[int, ...]) -> bool:
        m, n = shape[0], torch.Size(shape[1:]).numel()
        return self.rank * (m + n) < m * n

    def compress(self, M: Tensor, turn: Turn) -> Steps:
        left = turn.step % 2 == 0  # whether it is P, on the left, that is sought
        known, sought, A = ("Q", "P", M.mT) if left else ("P", "Q", M)
        B = turn.state.get(known)
        if B is None:
            shape = len(A), A.shape[1], self.rank
            B = torch.randn(shape, dtype=M.dtype, device=M.device, generator=turn.shared)
        B = yield Together(orthonormal, B.mT, turn.step)
        own = torch.bmm(B, A)
        P, Q = (own, B) if left else (B, own)
        rest = M.baddbmm_(P.mT, Q, alpha=-1)
        total = yield Sum(own)
        turn.state[sought] = total.mT.clone(memory_format=torch.contiguous_format)
        P, Q = (total, B) if left else (B, total)
        mean = turn.empty(M.shape, M.dtype)
        return mean.baddbmm_(P.mT, Q, beta=0, alpha=1 / turn.size), rest
