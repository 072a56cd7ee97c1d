"""LowRankLinear and LowRankConv1D against the multiplied-out dense layer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, factorized
from torch import nn

import pufferfish as pf

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
small = st.integers(1, 9)


@settings(deadline=None, max_examples=25)
@given(
    m=small,
    n=small,
    rank=small,
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    batch=st.sampled_from([(), (3,), (2, 3)]),
)
def test_linear(m, n, rank, bias, dtype, batch):
    torch.manual_seed(0)
    dense = nn.Linear(n, m, bias, dtype=dtype)
    low_rank = factorized(dense, min(rank, m, n))
    assert type(low_rank) is pf.layers.LowRankLinear
    assert low_rank.down.weight.shape == (min(rank, m, n), n)
    assert_same(low_rank, dense, [torch.randn(*batch, n, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv1d_of_transformers(dtype):
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    dense = pytorch_utils.Conv1D(7, 5).to(dtype)
    nn.init.normal_(dense.bias)
    low_rank = factorized(dense, 3)
    assert type(low_rank) is pf.layers.LowRankConv1D
    assert (low_rank.nf, low_rank.weight.shape) == (7, (5, 7))
    assert_same(low_rank, dense, [torch.randn(2, 4, 5, dtype=dtype)])
