"""PowerSGD (Vogels et al., 2019) and ACP-SGD (Zhang et al., 2023): gradients as products of two thin matrices."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..method import BLOCK, MessageGenerator, Method, StepContext, Sum

#: Number of steps with their own noise in `orthonormal_rows`; then it repeats.
SHIFTS = 1024


@dataclass(frozen=True)
class _PowerIteration(Method):
    """What both variants share: a rank, and which shapes become smaller."""

    rank: int = 4

    matrix = True
    exchanges = ("all_reduce",)

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"{type(self).__name__}: rank={self.rank!r} is not an integer ≥ 1")

    def fits(self, shape: tuple[int, ...]) -> bool:
        m, n = shape[0], torch.Size(shape[1:]).numel()
        return self.rank * (m + n) < m * n


@dataclass(frozen=True)
class PowerSGD(_PowerIteration):
    """M ≈ P Qᵀ of rank r by one power iteration per step: two all-reduces, of r·m and r·n numbers.

    P = Σ M Q, orthonormalised; Q = mean Mᵀ P; all workers apply P Qᵀ. Each worker keeps M − P (Mᵀ P)ᵀ, the part of its own
    matrix outside the common directions P, as error feedback. Q is the start of the next step's iteration. Factors of bf16
    gradients are sent in bf16.

    Args:
        rank: Lower → fewer bytes. A matrix that does not become smaller, r (m + n) ≥ m n, is sent uncompressed.

    >>> PowerSGD(rank=2).fits((64, 3, 3, 3)), PowerSGD(rank=2).fits((2, 100))
    (True, False)
    """

    shared_state = ("Q",)

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        b, _, n = M.shape
        Q = ctx.state.get("Q")
        if Q is None:
            Q = torch.randn(b, n, self.rank, dtype=M.dtype, device=M.device, generator=ctx.shared_rng)
        # Thin factors as rows: on CPUs such products are several times faster.
        rows = torch.bmm(Q.mT, M.mT)
        P = yield Sum(rows.bfloat16() if ctx.dtype == torch.bfloat16 else rows)
        P = orthonormal_rows(P.to(M.dtype), ctx.step)
        Q = (yield Sum(_project_out(M, P, ctx))).to(M.dtype)
        ctx.state["Q"] = Q.mT.clone(memory_format=torch.contiguous_format)
        return (P.mT, Q / ctx.size), M


@dataclass(frozen=True)
class AlternatingPowerSGD(_PowerIteration):
    """M ≈ P Qᵀ of rank r, one factor per step: half a power iteration and one all-reduce.

    The other factor is that of the step before, orthonormalised. Even steps: P = mean M Q, of r·m numbers. Odd steps:
    Q = mean Mᵀ P, of r·n. All workers apply P Qᵀ, and each keeps M − M Q Qᵀ or M − P Pᵀ M as error feedback.

    Args:
        rank: Lower → fewer bytes. A matrix that does not become smaller in two steps, r (m + n) ≥ m n, is sent uncompressed.

    >>> AlternatingPowerSGD(rank=2).fits((64, 3, 3, 3)), AlternatingPowerSGD(rank=2).fits((2, 100))
    (True, False)
    """

    shared_state = ("P", "Q")

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        left = ctx.step % 2 == 0  # whether this step computes P, the left factor
        known, wanted, A = ("Q", "P", M.mT) if left else ("P", "Q", M)
        B = ctx.state.get(known)
        if B is None:
            shape = len(A), A.shape[1], self.rank
            B = torch.randn(shape, dtype=M.dtype, device=M.device, generator=ctx.shared_rng)
        B = orthonormal_rows(B.mT, ctx.step)
        total = (yield Sum(_project_out(A, B, ctx))).to(M.dtype)
        ctx.state[wanted] = total.mT.clone(memory_format=torch.contiguous_format)
        P, Q = (total, B) if left else (B, total)
        return (P.mT, Q / ctx.size), M


def _project_out(A: Tensor, P: Tensor, ctx: StepContext) -> Tensor:
    """Return P A, (b, r, n), in bf16 if the gradients are, and subtract Pᵀ P A from A (b, m, n) in place.

    On a CPU in blocks that stay in its cache between the two products: of several matrices, or of columns of one.
    """
    b, m, n = A.shape
    dtype = torch.bfloat16 if ctx.dtype == torch.bfloat16 else A.dtype
    sent = torch.empty(b, P.shape[1], n, dtype=dtype, device=A.device)
    matrices, columns = b, n
    if A.device.type == "cpu":
        matrices = max(1, BLOCK // (m * n))
        columns = -(-n // -(-m * n // BLOCK))
    for i in range(0, b, matrices):
        for j in range(0, n, columns):
            block, rows = A[i : i + matrices, :, j : j + columns], P[i : i + matrices]
            own = torch.bmm(rows, block).to(dtype)
            block.baddbmm_(rows.mT, own.to(A.dtype), alpha=-1)  # what rounding loses is kept, too
            sent[i : i + matrices, :, j : j + columns] = own
    return sent


def orthonormal_rows(rows: Tensor, step: int = 0) -> Tensor:
    """Orthonormal rows that span those of each matrix in (b, r, n); random ones where they are zero or dependent.

    By a Cholesky factorization of their products in fp64. Noise of the size of fp32's rounding makes all rows
    independent, so that directions that a gradient lost can come back. It is the same on all workers. Rows made of noise
    alone may be a little shorter than 1, never longer.

    >>> x = orthonormal_rows(torch.tensor([[[3.0, 4.0, 0.0], [3.0, 4.0, 0.0]]]))
    >>> (x @ x.mT).round(decimals=1) + 0
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    _, r, n = rows.shape
    begin = step % SHIFTS
    noise = _noise(r, n, rows.device)[begin : begin + r * n].view(r, n)
    length = torch.linalg.vector_norm(rows, dim=2, keepdim=True, dtype=torch.float64).clamp_min_(1e-150)
    noisy = torch.addcdiv(noise, rows, length)  # rows of length 1 or 0, and noise, in fp64
    one = _identity(r, rows.device)
    products = torch.bmm(noisy, noisy.mT).add_(one, alpha=1e-14)  # never singular, even by chance
    L = torch.linalg.cholesky_ex(products).L
    inverse: Tensor = torch.linalg.solve_triangular(L, one.expand_as(L), upper=False)
    return torch.bmm(inverse, noisy).to(rows.dtype)


@cache
def _noise(r: int, n: int, device: torch.device) -> Tensor:
    """Drawn once: generators cost more than all else here, and cannot be used while a CUDA graph is captured."""
    rng = torch.Generator(device).manual_seed(0)
    noise = torch.randn(r * n + SHIFTS, dtype=torch.float64, device=device, generator=rng)
    return noise.mul_(3e-7 * n**-0.5)


@cache
def _identity(r: int, device: torch.device) -> Tensor:
    return torch.eye(r, dtype=torch.float64, device=device)
