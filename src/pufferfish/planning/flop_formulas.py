"""FLOP formulas of operators that torch's counter has wrong or lacks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = Sequence[int]

_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return the formulas by operator, for `FlopCounterMode(custom_mapping=…)`."""
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.aten.convolution_backward: _conv_backward,
        torch.ops.aten._grouped_mm: _grouped_mm,
        **{getattr(torch.ops.aten, f"_scaled_dot_product_{kind}"): _attention for kind in _ATTENTION},
        **{
            getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_backward"): _attention_backward
            for kind in _ATTENTION
        },
    }
    # Runs where the one above is not available. It exists once transformers is imported; in its backward pass it
    # calls products that are counted.
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return formulas | ({fallback: _grouped_mm} if fallback else {})


def _conv_backward(grad: Shape, x: Shape, weight: Shape, *args: Any, **_: Any) -> int:
    """Backward pass of a convolution. torch's formula ignores groups for the gradient of the weight."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, output_mask = args
    shape = x if transposed else grad
    macs = math.prod(weight) * shape[0] * math.prod(shape[2:])
    return 2 * macs * int(sum(output_mask[:2]))


# torch 2.11 raises for fewer heads of keys and values than of queries, and has no formula for attention on the CPU.


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Scores and weighted sums of values (batch, heads, time, features)."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward(grad: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Scores again, then the gradients of weights, values, queries and keys."""
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


def _grouped_mm(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """Products of the groups of two matrices or stacks.

    A matrix is divided into groups: its rows if the other one is a stack (rows × weights of their experts), its
    inner dimension if the other one is a matrix too (gradient of these weights).
    """
    stacks = a[0] if len(a) == len(b) == 3 else 1
    return 2 * stacks * a[-2] * a[-1] * b[-1]
