"""MACs of operators for which torch's counter has no formula."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pufferfish.planning.flop_formulas import flop_formulas

ROWS, N, M, GROUPS = 48, 16, 8, 4


def macs(run: Any) -> tuple[int, int]:
    """Forward and backward MACs of a function that returns a tensor."""
    with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counter:
        output: Tensor = run()
        forward = counter.get_total_flops()
        output.backward(torch.ones_like(output))
    return forward // 2, (counter.get_total_flops() - forward) // 2


def operands(dtype: torch.dtype, stored: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights (groups, n, m) in one of two layouts, and ends of the groups, of which one is empty."""
    rows = torch.randn(ROWS, N, dtype=dtype, requires_grad=True)
    weight = torch.randn(
        GROUPS, *((M, N) if stored == "transposed" else (N, M)), dtype=dtype, requires_grad=True
    )
    return rows, weight, torch.tensor([8, 8, 20, ROWS], dtype=torch.int32)


@pytest.mark.parametrize("stored", ["as used", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(dtype: torch.dtype, stored: str) -> None:
    rows, weight, ends = operands(dtype, stored)
    counted = macs(lambda: F.grouped_mm(rows, weight.mT if stored == "transposed" else weight, offs=ends))
    assert counted == (ROWS * N * M, 2 * ROWS * N * M)


def test_only_needed_gradients_are_counted() -> None:
    rows, weight, ends = operands(torch.float32, "as used")
    assert macs(lambda: F.grouped_mm(rows, weight.detach(), offs=ends)) == (ROWS * N * M, ROWS * N * M)
    assert macs(lambda: F.grouped_mm(rows.detach(), weight, offs=ends)) == (ROWS * N * M, ROWS * N * M)


def test_products_of_two_stacks() -> None:
    a, b = torch.randn(GROUPS, 8, N, requires_grad=True), torch.randn(GROUPS, N, M, requires_grad=True)
    assert macs(lambda: F.grouped_mm(a, b)) == (GROUPS * 8 * N * M, 2 * GROUPS * 8 * N * M)


def test_the_operator_of_transformers() -> None:
    pytest.importorskip("transformers.integrations.moe")
    rows, weight, ends = operands(torch.float32, "as used")
    counted = macs(lambda: torch.ops.transformers.grouped_mm_fallback(rows, weight, ends))
    assert counted == (ROWS * N * M, 2 * ROWS * N * M)


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_attention_with_shared_keys(kv_heads: int) -> None:
    """Every query head multiplies all keys and values, also if several heads share them; the kernel recomputes scores."""
    q = torch.randn(2, 6, 10, 8, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 12, 8, requires_grad=True) for _ in range(2))
    products = 2 * 6 * 10 * 12 * 8
    counted = macs(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads < 6))
    assert counted[0] == 2 * products
    assert counted[1] in (4 * products, 5 * products)
