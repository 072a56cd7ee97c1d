"""`fused_product`: the two products of a low-rank layer in one kernel, and their gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

#: Rows below which the kernel, with one program for each 128 rows, leaves most of a GPU idle.
MIN_ROWS = 8192
MAX_RANK = 128  # a program holds 128 × rank sums
SHARED_MEMORY = 144 * 1024  # bytes that a program takes, rounded up

_DTYPES = (torch.bfloat16, torch.float16)


def fits(n: int, r: int, m: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can compute n → r → m in this dtype.

    >>> fits(768, 64, 3072, torch.bfloat16), fits(768, 192, 768, torch.bfloat16), fits(768, 64, 768, torch.float32)
    (True, False, False)
    """
    return r <= MAX_RANK and not (n % 16 or r % 16 or m % 16) and dtype in _DTYPES


def compute_dtype(input: Tensor) -> torch.dtype:
    """The dtype that a product with `input` is computed in: that of autocast, if it is enabled.

    >>> compute_dtype(torch.ones(2))
    torch.float32
    """
    device = input.device.type
    if device == "meta" or input.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return input.dtype
    return torch.get_autocast_dtype(device)


def fused_product(input: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `second (first x) + bias` for every x, like two `F.linear`, where `fits` is true.

    The kernel reads the input once and writes the result between the products without reading it again. Gradients of the
    weights are computed in the weights' dtype, without rounding to that of the input. Second derivatives raise an error.

    Args:
        input: (…, n).
        first: (r, n).
        second: (m, r).
        bias: (m,).

    >>> x, V, U = (torch.randn(shape).bfloat16() for shape in ((4, 32), (16, 32), (48, 16)))
    >>> torch.allclose(fused_product(x, V, U, None), F.linear(F.linear(x, V), U), atol=0.1)
    True
    """
    rows = input.to(compute_dtype(input)).reshape(-1, input.shape[-1])
    output: Tensor = _FusedProduct.apply(rows, first, second, bias)  # type: ignore[no-untyped-call]
    return output.view(*input.shape[:-1], len(second))


class _FusedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
        V, U = first.to(x.dtype), second.to(x.dtype)
        y: Tensor
        y, t = two_products(x, V, U, bias)
        ctx.save_for_backward(x, t, V, U)
        ctx.dtypes = first.dtype, second.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, t, V, U = ctx.saved_tensors
        first, second, bias = ctx.dtypes
        dx = dV = dU = None
        if ctx.needs_input_grad[0]:
            dx, dt = two_products(dy, U.T, V.T, None)
        else:
            dt = dy @ U
        if ctx.needs_input_grad[1]:
            dV = _product(dt.T, x, first)
        if ctx.needs_input_grad[2]:
            dU = _product(dy.T, t, second)
        return dx, dV, dU, dy.sum(0, dtype=bias) if ctx.needs_input_grad[3] else None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` in a dtype; on CUDA the sums are not rounded before."""
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


# A custom operator: compilers, checkpointing and the meta device see the shapes of inputs and outputs only.


@torch.library.custom_op("pufferfish::two_products", mutates_args=())
def two_products(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`x firstᵀ secondᵀ + bias`, (rows, m), and `x firstᵀ`, (rows, r). The bias may have another dtype."""
    return _two_calls(x, first, second, bias)


@two_products.register_kernel("cuda")
def _(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    compute = _kernel(x.device.index) if len(x) >= MIN_ROWS else _two_calls
    return compute(x, first, second, bias)


def _two_calls(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    t = x @ first.T
    return F.linear(t, second, None if bias is None else bias.to(x.dtype)), t


@functools.cache
def _kernel(device: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel, or its replacement on a device that it does not suit: a plan may come from another machine."""
    if torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor < SHARED_MEMORY:
        return _two_calls
    try:
        from .fused_kernel import two_products_in_one_kernel
    except ImportError:  # without triton
        return _two_calls
    return two_products_in_one_kernel


@two_products.register_fake
def _(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], second.shape[0]), x.new_empty(x.shape[0], first.shape[0])


@register_flop_formula(torch.ops.pufferfish.two_products)
def _flops(x: Sequence[int], first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * x[0] * first[0] * (first[1] + second[0])
