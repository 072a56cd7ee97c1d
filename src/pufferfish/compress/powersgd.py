"""PowerSGD (Vogels et al., 2019): gradients as products of two thin matrices, by one power iteration a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .method import Method, Steps, Sum
from .turn import Turn


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
        P = orthonormal((yield Sum(Q.mT @ M.mT)), turn)
        own = P @ M
        Q = yield Sum(own.clone())
        Q /= turn.size
        turn.state["Q"] = Q.mT.clone(memory_format=torch.contiguous_format)
        mean = torch.bmm(P.mT, Q, out=turn.empty(M.shape, M.dtype))
        return mean, M.baddbmm_(P.mT, own, alpha=-1)


def orthonormal(rows: Tensor, turn: Turn) -> Tensor:
    """Orthonormal rows that span what `rows` (b, r, n) do; where those are zero or dependent, random ones besides.

    By a Cholesky factorization of their products in fp64, for few launches on a GPU. Noise of the size of fp32's
    rounding makes all rows independent, so that directions a gradient did not have can come back. Rows made of noise
    alone may be a little shorter than 1, never longer.

    >>> turn = Turn(rank=0, size=1, step=0, names=())
    >>> x = orthonormal(torch.tensor([[[3.0, 4.0, 0.0], [3.0, 4.0, 0.0]]]), turn)
    >>> (x @ x.mT).round(decimals=1) + 0
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    x = normalize(rows.double(), dim=2)
    noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=turn.shared)
    x.add_(noise, alpha=3e-7 * x.shape[2] ** -0.5)
    products = x @ x.mT
    products.diagonal(dim1=1, dim2=2).add_(1e-14)  # never singular, even by chance
    L = torch.linalg.cholesky_ex(products).L
    found: Tensor = torch.linalg.solve_triangular(L, x, upper=False)
    return found.to(rows.dtype)
