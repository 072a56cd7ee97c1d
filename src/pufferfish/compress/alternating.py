"""Alternating PowerSGD (ACP-SGD, Zhang et al., 2023): half a power iteration a step, so one message a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .method import Method, Steps, Sum
from .turn import Turn


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
    shared_state = ("P", "Q")

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"AlternatingPowerSGD: rank={self.rank!r} is not a whole number ≥ 1")

    def fits(self, shape: tuple[int, ...]) -> bool:
        m, n = shape[0], torch.Size(shape[1:]).numel()
        return self.rank * (m + n) < m * n

    def compress(self, M: Tensor, turn: Turn) -> Steps:
        known, sought = ("Q", "P") if turn.step % 2 == 0 else ("P", "Q")
        A = M if sought == "P" else M.mT
        B = turn.state.get(known)
        if B is None:
            B = torch.randn(
                len(A), A.shape[2], self.rank, dtype=M.dtype, device=M.device, generator=turn.shared
            )
        B = torch.linalg.qr(B).Q  # of whatever rank, also of zeros, its columns are orthonormal
        own = A @ B
        total = yield Sum(own)
        turn.state[sought] = total / turn.size
        mean, rest = turn.state[sought] @ B.mT, torch.baddbmm(A, own, B.mT, alpha=-1)
        return (mean, rest) if sought == "P" else (mean.mT.contiguous(), rest.mT.contiguous())
