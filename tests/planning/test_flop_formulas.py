"""MACs of operators for which torch's counter has no formula."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pufferfish.planning.profile import flop_formulas


def macs(run: Any) -> tuple[int, int]:
    """Forward and backward MACs of a function that returns a tensor."""
    with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counter:
        output: Tensor = run()
        forward = counter.get_total_flops()
        output.backward(torch.ones_like(output))
    return forward // 2, (counter.get_total_flops() - forward) // 2


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_attention_with_shared_keys(kv_heads: int) -> None:
    """Every query head multiplies all keys and values, also if several heads share them; the kernel recomputes scores."""
    q = torch.randn(2, 6, 10, 8, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 12, 8, requires_grad=True) for _ in range(2))
    products = 2 * 6 * 10 * 12 * 8
    counted = macs(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads < 6))
    assert counted[0] == 2 * products
    assert counted[1] in (4 * products, 5 * products)
