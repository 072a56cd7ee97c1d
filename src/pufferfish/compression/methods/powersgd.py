"""PowerSGD (Vogels et al., 2019): gradients as products of two thin matrices, by one power iteration a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Method, Steps, Sum, Together
from ..turn import Turn
from .orthonormal import orthonormal


@dataclass(frozen=True)
class PowerSGD(Method):
    """M ≈ P Qᵀ of rank r, by two all-reduces of r·m and r·n numbers.

    P = Σ M Q, orthonormalised; Q = mean Mᵀ P; all apply P Qᵀ. Each worker keeps M − P (Mᵀ P)ᵀ, what the
    common directions P leave of its own matrix. Q starts the next step's iteration.

    Args:
        rank: lower → fewer bytes. A matrix that gets no smaller, r (m + n) ≥ m n, travels as it is.

    >>> PowerSGD(rank=2).fits((64, 3, 3, 3)), PowerSGD(rank=2).fits((2, 100))
    (True, False)
    """

    rank: int = 4

    matrix = True
    exchanges = ("all_reduce",)
    shared_state = ("Q",)

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"PowerSGD: rank={self.rank!r} is not a whole number ≥ 1")

    def fits(self, shape: tuple[int, ...]) -> bool:
        m, n = shape[0], torch.Size(shape[1:]).numel()
        return self.rank * (m + n) < m * n

    def compress(self, M: Tensor, turn: Turn) -> Steps:
        b, _, n = M.shape
        Q = turn.state.get("Q")
        if Q is None:
            Q = torch.randn(b, n, self.rank, dtype=M.dtype, device=M.device, generator=turn.shared)
        # Thin factors as rows: on CPUs such products are several times faster.
        P = yield Sum(torch.bmm(Q.mT, M.mT))
        P = yield Together(orthonormal, P, turn.step)
        own = torch.bmm(P, M)
        rest = M.baddbmm_(P.mT, own, alpha=-1)
        Q = yield Sum(own)
        turn.state["Q"] = Q.mT.clone(memory_format=torch.contiguous_format)
        mean = turn.empty(M.shape, M.dtype)
        return mean.baddbmm_(P.mT, Q, beta=0, alpha=1 / turn.size), rest
