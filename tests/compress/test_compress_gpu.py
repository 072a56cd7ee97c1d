"""Methods on a GPU: the same promises, and no waiting for the device in an ordinary step."""

from __future__ import annotations

import pytest
import torch

from pufferfish.compress import (
    QSGD,
    Aggregator,
    BFloat16,
    Method,
    PowerSGD,
    RandomK,
    SignSGD,
    Simulated,
    TopK,
)
from pufferfish.compress.testing import check_compressor, gradients

METHODS = [BFloat16(), PowerSGD(), TopK(), RandomK(), RandomK(coordinates="own"), SignSGD(), QSGD()]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_properties(method: Method) -> None:
    before = torch.cuda.get_rng_state()
    check_compressor(method, sizes=(1, 2), draws=100, device="cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_nothing_waits(method: Method) -> None:
    aggregator = Aggregator(method, Simulated(2), smallest=0)
    given = [gradients(2, step, "cuda") for step in range(4)]
    for g in given[:2]:
        aggregator.together(g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for g in given[2:]:
            aggregator.together(g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seconds = aggregator.meter.seconds
    assert min(seconds.values()) > 0
