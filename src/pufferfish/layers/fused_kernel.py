"""`two_products_in_one_kernel`: x → x Vᵀ → x Vᵀ Uᵀ + b as a Triton kernel. Imported when it is first used: it needs triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128  # of each program
STAGES = 3  # of the pipelines that load tiles


def two_products_in_one_kernel(
    x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`pufferfish::two_products` for sizes that are multiples of 16, and r ≤ 128. Any strides."""
    (rows, n), (m, r) = x.shape, second.shape
    if x.stride(1) * n >= 2**31:  # offsets within a row are 32-bit integers
        x = x.contiguous()
    y, t = x.new_empty(rows, m), x.new_empty(rows, r)
    with torch.cuda.device_of(x):
        two_products_kernel[(triton.cdiv(rows, ROWS),)](
            x, first, second, y if bias is None else bias.contiguous(), t, y, rows,
            *x.stride(), *first.stride(), *second.stride(),
            N=n, R=r, M=m, ROWS=ROWS, TILE_N=_tile(n, 64), TILE_R=triton.next_power_of_2(r), TILE_M=_tile(m, 128),
            BIAS=bias is not None, STAGES=STAGES, num_warps=8 if r > 64 else 4,
        )  # fmt: skip
    return y, t


def _tile(size: int, largest: int) -> int:
    """The largest power of two that divides a size, so that no tile needs a mask."""
    return min(size & -size, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _load(pointers, inside, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    if PADDED:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit  # type: ignore[untyped-decorator]
def two_products_kernel(  # type: ignore[no-untyped-def]
    x, first, second, bias, t_out, y_out, rows,
    x_row, x_column, first_row, first_column, second_row, second_column,
    N: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, TILE_R: tl.constexpr, TILE_M: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS  # y may have more than 2³¹ elements
    i, j = tl.arange(0, ROWS), tl.arange(0, TILE_R)
    last = (rows - start - 1).to(tl.int32)  # rows after it are computed but not stored
    x += start * x_row + tl.minimum(i, last)[:, None] * x_row
    t_out += start * R
    y_out += start * M

    sums = tl.zeros((ROWS, TILE_R), dtype=tl.float32)
    for k in tl.range(0, N, TILE_N, num_stages=STAGES):
        ks = k + tl.arange(0, TILE_N)
        a = tl.load(x + ks[None, :] * x_column)
        b = _load(first + j[None, :] * first_row + ks[:, None] * first_column, j[None, :] < R, TILE_R != R)
        sums = tl.dot(a, b, sums)
    t = sums.to(t_out.dtype.element_ty)
    tl.store(t_out + i[:, None] * R + j[None, :], t, mask=(i[:, None] <= last) & (j[None, :] < R))

    for k in tl.range(0, M, TILE_M, num_stages=STAGES):
        ks = k + tl.arange(0, TILE_M)
        b = _load(second + ks[None, :] * second_row + j[:, None] * second_column, j[:, None] < R, TILE_R != R)
        y = tl.dot(t, b)
        if BIAS:
            y += tl.load(bias + ks)[None, :].to(tl.float32)
        tl.store(y_out + i[:, None] * M + ks[None, :], y.to(y_out.dtype.element_ty), mask=i[:, None] <= last)
