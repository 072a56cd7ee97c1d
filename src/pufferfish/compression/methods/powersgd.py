"""Low rank: PowerSGD (Vogels et al., 2019), ACP-SGD (Zhang et al., 2023) and ATOMO (Wang et al., 2018)."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..method import Gather, Kept, MessageGenerator, Method, StepContext, Sum, check_whole
from .sums import NoCompression

#: Number of steps with their own noise in `orthonormal_rows`; then it repeats.
SHIFTS = 1024


@dataclass(frozen=True)
class TwoFactors(Method):
    """Common base of methods that send two thin factors of each matrix: their rank, and which shapes become smaller."""

    rank: int = 4

    layout = "matrices"
    exchanges = ("all_reduce",)

    def __post_init__(self) -> None:
        check_whole(self, "rank")

    def fits(self, shape: tuple[int, ...]) -> bool:
        m, n = shape[0], torch.Size(shape[1:]).numel()
        return self.rank * (m + n) < m * n


@dataclass(frozen=True)
class PowerSGD(TwoFactors):
    """M ≈ P Qᵀ of rank r by one power iteration per step: two all-reduces, of r·m and r·n numbers.

    P = Σ M Q, orthonormalised; Q = mean Mᵀ P; all workers apply P Qᵀ. Each worker keeps M − P (Mᵀ P)ᵀ, the part of its own
    matrix outside the common directions P, as error feedback. Q is the warm start of the next step. Factors of bf16
    gradients are sent in bf16.

    Args:
        rank: Lower → fewer bytes. A matrix that does not become smaller, r (m + n) ≥ m n, is sent uncompressed.
        start: The first steps of the engine (averages, in local steps) that are sent uncompressed. More → fewer errors while
            gradients change fast.
        bf16: Send the factors in bf16, whatever the gradients are in: half the bytes. Error feedback keeps what rounding loses.

    >>> PowerSGD(rank=2).fits((64, 3, 3, 3)), PowerSGD(rank=2).fits((2, 100))
    (True, False)
    """

    start: int = 0
    bf16: bool = False

    state: ClassVar = {"Q": Kept("shared")}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "start", least=0)

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        if ctx.step < self.start:
            mean, _ = yield from NoCompression().compress(M, ctx)
            return mean, torch.zeros_like(M)
        b, _, n = M.shape
        Q = ctx.state.get("Q")
        if Q is None:
            Q = torch.randn(b, n, self.rank, dtype=M.dtype, device=M.device, generator=ctx.shared_rng)
        # Thin factors as rows: on CPUs such products are several times faster.
        Q = Q.mT.contiguous()
        short = n < 1024 and M.device.type == "cpu"
        rows = torch.bmm(M, Q.mT).mT if short else torch.bmm(Q, M.mT)
        dtype = torch.bfloat16 if self.bf16 or ctx.dtype == torch.bfloat16 else M.dtype
        P = yield Sum(rows.to(dtype))
        P = orthonormal_rows(P.to(M.dtype), ctx.step)
        Q = (yield Sum(_project_out(M, P, dtype))).to(M.dtype)
        ctx.state["Q"] = Q.mT.clone(memory_format=torch.contiguous_format)
        return (P.mT, Q / ctx.size), M


@dataclass(frozen=True)
class AlternatingPowerSGD(TwoFactors):
    """M ≈ P Qᵀ of rank r, one factor per step: half a power iteration and one all-reduce.

    The other factor is that of the step before, orthonormalised. Even steps: P = mean M Q, of r·m numbers. Odd steps:
    Q = mean Mᵀ P, of r·n. All workers apply P Qᵀ, and each keeps M − M Q Qᵀ or M − P Pᵀ M as error feedback.

    Args:
        rank: Lower → fewer bytes. A matrix that does not become smaller in two steps, r (m + n) ≥ m n, is sent uncompressed.

    >>> AlternatingPowerSGD(rank=2).fits((64, 3, 3, 3)), AlternatingPowerSGD(rank=2).fits((2, 100))
    (True, False)
    """

    state: ClassVar = {"P": Kept("shared"), "Q": Kept("shared")}

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        left = ctx.step % 2 == 0  # whether this step computes P, the left factor
        known, wanted = ("Q", "P") if left else ("P", "Q")
        B = ctx.state.get(known)
        if B is None:
            shape = len(M), M.shape[2 if left else 1], self.rank
            B = torch.randn(shape, dtype=M.dtype, device=M.device, generator=ctx.shared_rng)
        B = orthonormal_rows(B.mT, ctx.step)
        dtype = torch.bfloat16 if ctx.dtype == torch.bfloat16 else M.dtype
        total = (yield Sum(_project_out(M, B, dtype, left))).to(M.dtype)
        ctx.state[wanted] = total.mT.clone(memory_format=torch.contiguous_format)
        P, Q = (total, B) if left else (B, total)
        return (P.mT, Q / ctx.size), M


def _project_out(M: Tensor, B: Tensor, dtype: torch.dtype, right: bool = False) -> Tensor:
    """Return B M (b, r, n), or M Bᵀ as rows (b, r, m) if `right`, as `dtype`, and subtract its product with B from M in place.

    On a CPU one large matrix or a few small ones at a time, so that the second
    product finds them in the cache.
    """
    b, m, n = M.shape
    sent = torch.empty(b, B.shape[1], m if right else n, dtype=dtype, device=M.device)
    step = max(1, 2**17 // (m * n)) if M.device.type == "cpu" else b
    for some, known, own in zip(M.split(step), B.split(step), sent.split(step), strict=True):
        if right:
            own.copy_(torch.bmm(known, some.mT))
            blocks, Q = row_blocks(some, own.mT.to(M.dtype).contiguous()), known
        else:
            blocks = row_blocks(some, known.mT.contiguous())
            sums = [torch.bmm(p.mT, x).view(len(some), -1, *own.shape[1:]).sum(1) for x, p in blocks]
            Q = own.copy_(sum(sums[1:], sums[0])).to(M.dtype)
        for x, p in blocks:  # subtract what is sent: what rounding loses is kept, too
            x.baddbmm_(p, Q.expand(len(x), -1, -1), alpha=-1)
    return sent


def row_blocks(M: Tensor, P: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of M (b, m, n) and P (b, m, r) for products with thin matrices: one large matrix on a CPU in blocks of rows.

    As (blocks, rows, …), then the rows that are left. A CPU multiplies few rows at a time up to twice as fast: a block stays
    in its cache, and in a larger one rows of, say, 1,024 numbers evict each other. Others are returned as they are, and those
    of rank 1, which a CPU multiplies in another way.

    >>> [tuple(x.shape) for x, _ in row_blocks(torch.ones(1, 70, 1000), torch.ones(1, 70, 4))]
    [(4, 16, 1000), (1, 6, 1000)]
    """
    (b, m, n), r = M.shape, P.shape[2]
    rows = 16
    while rows < 4 * r or rows * n <= 12_288:  # measured: few rows, more of them where they are short
        rows *= 2
    whole = m - m % rows
    if b > 1 or whole == 0 or r == 1 or M.device.type != "cpu":
        return [(M, P)]
    blocks = [(M[0, :whole].view(-1, rows, n), P[0, :whole].view(-1, rows, r))]
    return blocks if whole == m else [*blocks, (M[:, whole:], P[:, whole:])]


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
    one = torch.eye(r, dtype=torch.float64, device=rows.device)
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


@dataclass(frozen=True)
class Atomo(TwoFactors):
    """M = Σ σᵢ uᵢ vᵢᵀ; term i is sent with probability pᵢ, divided by pᵢ, all-gathered.

    pᵢ = min(1, c·σᵢ) with Σ pᵢ = r, which minimises the variance. Systematic sampling: one random number u draws all terms;
    term i is taken if one of u, u + 1, … falls into the i-th of consecutive intervals of lengths pᵢ. Exactly r terms
    are taken, so that messages have one size. A matrix of lower rank is padded with zeros.

    An SVD of every matrix in every step is slow: this method is for comparison.

    Args:
        rank: r, the number of terms. Lower → fewer bytes, more noise. A matrix that does not become smaller,
            r (m + n) ≥ m n, is sent uncompressed.

    >>> Atomo(rank=2).fits((64, 3, 3, 3)), Atomo(rank=2).fits((2, 100))
    (True, False)
    """

    rank: int = 3

    exchanges = ("all_gather",)
    kind = "unbiased"

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        U, sigma, Vt = torch.linalg.svd(M, full_matrices=False)
        p = probabilities(sigma.double(), self.rank)
        ends = p.cumsum(-1)
        u = torch.rand(len(M), 1, dtype=p.dtype, device=M.device, generator=ctx.own_rng)
        marks = u + torch.arange(self.rank, device=M.device)
        i = torch.searchsorted(ends, marks, right=True).clamp_(max=p.shape[1] - 1)
        weight = (sigma / p.clamp_min(1e-300)).gather(1, i)
        weight *= marks < ends[:, -1:]  # no term beyond the last interval
        left = U.gather(2, i[:, None].expand(-1, M.shape[1], -1)) * weight[:, None].to(M.dtype)
        right = Vt.gather(1, i[..., None].expand(-1, -1, M.shape[2]))
        lefts, rights = zip(*(yield Gather((left, right))), strict=True)
        return torch.cat(lefts, 2) @ torch.cat(rights, 1) / ctx.size, None


def probabilities(sigma: Tensor, r: int) -> Tensor:
    """min(1, c·σᵢ) with the sum r, or the number of σᵢ > 0 if that is less; σ is in descending order.

    >>> probabilities(torch.tensor([[6.0, 2.0, 1.0, 1.0]]), 2)
    tensor([[1.0000, 0.5000, 0.2500, 0.2500]])
    """
    rest = sigma.flip(-1).cumsum(-1).flip(-1)  # σᵢ + σᵢ₊₁ + …
    room = r - torch.arange(
        sigma.shape[-1], device=sigma.device
    )  # their sum of probabilities if all before are 1
    first = (sigma * room <= rest).int().argmax(-1, keepdim=True)  # the first below 1
    c = room.expand_as(rest).gather(-1, first) / rest.gather(-1, first).clamp_min(1e-300)
    return (c * sigma).clamp_max(1)
