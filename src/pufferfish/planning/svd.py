"""The truncated SVD that splits a matrix into two thin ones, and spectra."""

from __future__ import annotations

import torch
from torch import Tensor

# Columns of the matrix that are held in fp64 at a time, as a part of its shorter side.
_CHUNK = 4


def split(W: Tensor, r: int) -> tuple[Tensor, Tensor, float]:
    """The best `U V` of rank `r` for W (blocks, m, n), √Σ on each side, and the relative error left.

    Works in fp64 for fp64 weights and through the fp64 Gram matrix for all others: squaring the condition
    number costs half the digits, and half of fp64's are all that fp32 has. It is 2 times faster than an
    fp32 SVD on a CPU and far more on a GPU. U and V come back in fp64 or fp32.

    A direction that W does not have (σ = 0) is a zero in one factor but not in the other: with zeros in
    both no gradient would ever reach it, and a layer that starts at zero could not learn.

    >>> W = torch.arange(6.0).view(1, 2, 3)
    >>> U, V, error = split(W, 2)
    >>> U.shape, V.shape, torch.allclose(U @ V, W, atol=1e-5)
    (torch.Size([1, 2, 2]), torch.Size([1, 2, 3]), True)
    """
    pairs = [_split_one(block, r) for block in W.detach()]
    U, V, lost, total = zip(*pairs, strict=True)
    error = (max(0.0, sum(lost)) / max(sum(total), torch.finfo(torch.float64).tiny)) ** 0.5
    return torch.stack(U), torch.stack(V), error


def spectrum(W: Tensor) -> Tensor:
    """Singular values of W (blocks, m, n), largest first; of several blocks the root mean square.

    >>> spectrum(torch.diag(torch.tensor([3.0, 4.0])).unsqueeze(0))
    tensor([4., 3.], dtype=torch.float64)
    """
    squares = [torch.linalg.eigvalsh(_gram(_wide(block))).clamp_min(0).flip(0) for block in W.detach()]
    return torch.stack(squares).mean(0).sqrt().cpu()


def _wide(W: Tensor) -> Tensor:
    return W if W.shape[0] <= W.shape[1] else W.mT


def _split_one(W: Tensor, r: int) -> tuple[Tensor, Tensor, float, float]:
    wide = _wide(W)
    first, second = (_by_svd, _by_gram) if W.dtype == torch.float64 else (_by_gram, _by_svd)
    try:
        left, right, values = first(wide, r)
    except RuntimeError:  # LinAlgError, or what else a GPU's solver raises
        left, right, values = second(wide, r)
    U, V = (left, right) if wide is W else (right.mT, left.mT)
    squares = values.square()
    return U.contiguous(), V.contiguous(), float(squares[r:].sum()), float(squares.sum())


def _by_svd(wide: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """U√Σ, √ΣVᵀ and all singular values of a wide matrix, directly."""
    V, values, Uh = torch.linalg.svd(wide.double().mT, full_matrices=False)  # tall is what LAPACK is fast at
    root = _root(values, r, wide.shape[1] * torch.finfo(torch.float64).eps)
    dtype = _dtype(wide)
    return (Uh[:r].mT * _alive(root)).to(dtype), (root[:, None] * V[:, :r].mT).to(dtype), values


def _by_gram(wide: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the eigenvectors of W Wᵀ in fp64."""
    # Column by column, as LAPACK stores it: so it is overwritten and not copied.
    vectors = _gram(wide).mT
    squares = vectors.new_empty(len(vectors))
    torch.linalg.eigh(vectors, out=(squares, vectors))
    values = squares.clamp_min(0).sqrt().flip(0)
    left = vectors[:, -r:].flip(1)
    del vectors  # twice the weight where it is square
    # What lies below fp64's resolution of the Gram matrix is zero, not noise divided by zero.
    root = _root(values, r, torch.finfo(torch.float64).eps ** 0.5)
    scale = torch.where(root > 0, 1 / root, root)[:, None]
    right = wide.new_empty(r, wide.shape[1], dtype=_dtype(wide))
    for here, columns in zip(right.split(_width(wide), 1), wide.split(_width(wide), 1), strict=True):
        here.copy_(scale * (left.mT @ columns.double()))
    return (left * _alive(root)).to(right.dtype), right, values


def _dtype(wide: Tensor) -> torch.dtype:
    return torch.float64 if wide.dtype == torch.float64 else torch.float32


def _root(values: Tensor, r: int, resolution: float) -> Tensor:
    """√σ of the first r singular values, 0 where they cannot be told from it."""
    return torch.where(values > values[0] * resolution, values, 0)[:r].sqrt()


def _alive(root: Tensor) -> Tensor:
    """√σ with something of the same size in the place of zeros: two zero factors would never learn."""
    some = root[root > 0]
    return torch.where(root > 0, root, some.mean() if len(some) else 1.0)


def _gram(wide: Tensor) -> Tensor:
    gram = wide.new_zeros(wide.shape[0], wide.shape[0], dtype=torch.float64)
    for columns in wide.split(_width(wide), 1):
        wider = columns.double()
        gram.addmm_(wider, wider.mT)
        del wider  # before the next one is made
    return gram


def _width(wide: Tensor) -> int:
    return max(256, wide.shape[0] // _CHUNK)
