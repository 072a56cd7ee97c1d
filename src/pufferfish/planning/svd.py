"""`split`: truncated SVD of a matrix into two factors; `spectrum`: its singular values."""

import torch
from torch import Tensor

from .entries import Entry

#: Why a weight cannot be factorized, and what to do.
NOT_FINITE = (
    "the weight contains inf or NaN; nothing was changed. If training has diverged, lower the learning rate, or skip "
    "updates that are not finite with pf.distributed.FiniteGuard"
)


def check_values(name: str, weight: Tensor) -> None:
    """Raise ValueError unless the weight has values and all of them are finite."""
    if weight.is_meta:
        raise ValueError(f"{name}: the weight is on the meta device and has no values")
    if not torch.isfinite(weight.detach()).all():
        raise ValueError(f"{name}: {NOT_FINITE}")


def svd_factors(e: Entry, W: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """`split` for the rank of an entry, after a check of the values; without values on the meta device."""
    assert e.rank is not None
    if W.is_meta:
        return W.new_empty(*W.shape[:2], e.rank), W.new_empty(len(W), e.rank, W.shape[2]), None
    check_values(e.name, W)
    return split(W, e.rank)


def split(W: Tensor, r: int) -> tuple[Tensor, Tensor, float]:
    """Compute the best approximation `U V` of rank `r` for W (blocks, m, n), with √Σ on each side.

    Uses an fp64 SVD for fp64 weights and the fp64 Gram matrix for all others: squaring the condition number
    costs half of the digits, and half of fp64's digits are as many as fp32 has. This is twice as fast as an
    fp32 SVD on a CPU and much faster on a GPU.

    For singular values σ = 0 only one factor is zero: if both were, no gradient would reach them, and a
    layer that is initialised to zero could not learn.

    Returns:
        U (blocks, m, r) and V (blocks, r, n) in fp64 or fp32, and the relative error ‖W − UV‖ / ‖W‖.
    """
    U, V, lost, total = zip(*(_split_one(block, r) for block in W.detach()), strict=True)
    error = (max(0.0, sum(lost)) / max(sum(total), torch.finfo(torch.float64).tiny)) ** 0.5
    return torch.stack(U), torch.stack(V), error


def spectrum(W: Tensor) -> Tensor:
    """Compute the singular values of W (blocks, m, n), largest first; root mean square over the blocks."""
    squares = [torch.linalg.eigvalsh(_gram(_wide(block))).clamp_min(0).flip(0) for block in W.detach()]
    return torch.stack(squares).mean(0).sqrt().cpu()


def _wide(W: Tensor) -> Tensor:
    return W if W.shape[0] <= W.shape[1] else W.mT


def _split_one(W: Tensor, r: int) -> tuple[Tensor, Tensor, float, float]:
    wide = _wide(W)
    first, second = (_by_svd, _by_gram) if W.dtype == torch.float64 else (_by_gram, _by_svd)
    try:
        left, right, values = first(wide, r)
    except RuntimeError:  # LinAlgError, or another error of the GPU solver
        left, right, values = second(wide, r)
    U, V = (left, right) if wide is W else (right.mT, left.mT)
    if not (used := W.any(0)).all():
        # A column of zeros in W is one in V too, but for rounding: the padding row of an embedding must stay zero.
        # Rows of V for σ = 0 are not determined by W.
        V = torch.where(used | ~U.any(0)[:, None], V, 0)
    squares = values.square()
    return U.contiguous(), V.contiguous(), float(squares[r:].sum()), float(squares.sum())


def _by_svd(wide: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute U√Σ, √ΣVᵀ and all singular values of a wide matrix by an fp64 SVD."""
    # Transposed, because LAPACK is faster on tall matrices.
    V, values, Uh = torch.linalg.svd(wide.double().mT, full_matrices=False)
    root = _root(values, r, wide.shape[1] * torch.finfo(torch.float64).eps)
    dtype = _dtype(wide)
    return (Uh[:r].mT * _nonzero(root)).to(dtype), (root[:, None] * V[:, :r].mT).to(dtype), values


def _by_gram(wide: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as `_by_svd` from the eigenvectors of W Wᵀ in fp64."""
    # Column-major, so that LAPACK overwrites it instead of making a copy.
    vectors = _gram(wide).mT
    squares = vectors.new_empty(len(vectors))
    torch.linalg.eigh(vectors, out=(squares, vectors))
    values = squares.clamp_min(0).sqrt().flip(0)
    left = vectors[:, -r:].flip(1)
    del vectors  # for a square fp32 weight, twice its memory
    # Singular values below the fp64 resolution of the Gram matrix are noise: treat them as zero.
    root = _root(values, r, torch.finfo(torch.float64).eps ** 0.5)
    scale = torch.where(root > 0, 1 / root, root)[:, None]
    right = wide.new_empty(r, wide.shape[1], dtype=_dtype(wide))
    for out, columns in zip(right.split(_width(wide), 1), wide.split(_width(wide), 1), strict=True):
        out.copy_(scale * (left.mT @ columns.double()))
    return (left * _nonzero(root)).to(right.dtype), right, values


def _dtype(wide: Tensor) -> torch.dtype:
    return torch.float64 if wide.dtype == torch.float64 else torch.float32


def _root(values: Tensor, r: int, resolution: float) -> Tensor:
    """√σ of the first r singular values, 0 where they are below the resolution relative to the largest."""
    return torch.where(values > values[0] * resolution, values, 0)[:r].sqrt()


def _nonzero(root: Tensor) -> Tensor:
    """Replace zeros in √σ by the mean of the others: if both factors were zero, they could not learn."""
    positive = root[root > 0]
    return torch.where(root > 0, root, positive.mean() if len(positive) else 1.0)


def _gram(wide: Tensor) -> Tensor:
    gram = wide.new_zeros(wide.shape[0], wide.shape[0], dtype=torch.float64)
    for columns in wide.split(_width(wide), 1):
        chunk = columns.double()
        gram.addmm_(chunk, chunk.mT)
        del chunk  # before the next one is allocated
    return gram


def _width(wide: Tensor) -> int:
    """Number of columns that are converted to fp64 at once: a quarter of the rows, to bound memory."""
    return max(256, wide.shape[0] // 4)
