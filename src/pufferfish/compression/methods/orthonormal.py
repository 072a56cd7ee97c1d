"""Orthonormal rows of many small matrices in few calls: on a GPU, starting them takes longer than computing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

#: How many steps have noise of their own; then it comes again.
SHIFTS = 1024


def orthonormal(rows: Sequence[Tensor], step: int = 0) -> list[Tensor]:
    """Orthonormal rows that span what those of each (b, r, n) do; where they are zero or dependent, random ones besides.

    By Cholesky factorizations of their products in fp64. Noise of the size of fp32's rounding makes all rows
    independent, so that directions a gradient did not have can come back. It is the same on all workers. Rows made of
    noise alone may be a little shorter than 1, never longer.

    >>> (x,) = orthonormal([torch.tensor([[[3.0, 4.0, 0.0], [3.0, 4.0, 0.0]]])])
    >>> (x @ x.mT).round(decimals=1) + 0
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    alike, apart = _stacked(rows)
    noisy = [_noisy(x, step) for x in alike]
    products, apart_again = _stacked([torch.bmm(x, x.mT) for x in noisy])
    inverses = apart_again([_inverse_root(product) for product in products])
    found = [torch.bmm(inverse, x) for inverse, x in zip(inverses, noisy, strict=True)]
    return apart([x.to(like.dtype) for x, like in zip(found, alike, strict=True)])


def _noisy(rows: Tensor, step: int) -> Tensor:
    """Rows of length 1, or 0, and noise, in fp64."""
    _, r, n = rows.shape
    begin = step % SHIFTS
    noise = _noise(r, n, rows.device)[begin : begin + r * n].view(r, n)
    length = torch.linalg.vector_norm(rows, dim=2, keepdim=True, dtype=torch.float64).clamp_min_(1e-150)
    return torch.addcdiv(noise, rows, length)


@cache
def _noise(r: int, n: int, device: torch.device) -> Tensor:
    """Drawn once: generators cost more than all else here, and may not be asked while a CUDA graph is captured."""
    stream = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(r * n + SHIFTS, dtype=torch.float64, device=device, generator=stream)
    return drawn.mul_(3e-7 * n**-0.5)


def _inverse_root(products: Tensor) -> Tensor:
    """L⁻¹ for products = L Lᵀ, made to exist."""
    products.diagonal(dim1=1, dim2=2).add_(1e-14)  # never singular, even by chance
    one = torch.eye(products.shape[1], dtype=products.dtype, device=products.device)
    L = torch.linalg.cholesky_ex(products).L
    inverse: Tensor = torch.linalg.solve_triangular(L, one.expand_as(L), upper=False)
    return inverse


def _stacked(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
    """Those of equal dtypes and shapes, but for the first dimension, as one; and what takes such apart again."""
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        alike.setdefault((x.shape[1:], x.dtype), []).append(i)

    def apart(joined: Sequence[Tensor]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for which, x in zip(alike.values(), joined, strict=True):
            found.update(zip(which, x.split([len(tensors[i]) for i in which]), strict=True))
        return [found[i] for i in range(len(tensors))]

    joined = [[tensors[i] for i in which] for which in alike.values()]
    return [some[0] if len(some) == 1 else torch.cat(some) for some in joined], apart
