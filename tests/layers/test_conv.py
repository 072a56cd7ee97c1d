"""Low-rank convolutions against the multiplied-out dense layer."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, factorized
from torch import nn

import pufferfish as pf

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@st.composite
def settings_of_both(draw: st.DrawFn, dims: int) -> dict[str, Any]:
    def each(low: int, high: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(low, high)] * dims))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels = st.integers(1 if groups == 1 else 2, 4).map(lambda x: x * groups)
    return {
        "in_channels": draw(channels),
        "out_channels": draw(channels),
        "kernel_size": each(1, 3),
        "stride": each(1, 3),
        "padding": each(0, 1),
        "dilation": each(1, 2),
        "groups": groups,
        "bias": draw(st.booleans()),
    }


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Module:
    dims = draw(st.sampled_from([1, 2, 2, 3]))
    options = draw(settings_of_both(dims))
    options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    match draw(st.sampled_from(["numbers", "same", "valid"])):
        case "same":
            options |= {"padding": "same", "stride": 1}
        case "valid":
            options |= {"padding": "valid"}
    torch.manual_seed(0)
    return CONV[dims](**options, dtype=torch.float64)


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> nn.Module:
    dims = draw(st.sampled_from([1, 2, 2, 3]))
    options = draw(settings_of_both(dims))
    room = [max(s, d) - 1 for s, d in zip(options["stride"], options["dilation"], strict=True)]
    options["output_padding"] = draw(st.tuples(*(st.integers(0, x) for x in room)))
    torch.manual_seed(0)
    return TRANSPOSED[dims](**options, dtype=torch.float64)


def random_input(dense: nn.Module, size: int, batch: tuple[int, ...] = (2,)) -> torch.Tensor:
    dims = dense.weight.dim() - 2
    return torch.randn(*batch, dense.in_channels, *range(size, size + dims), dtype=dense.weight.dtype)


@settings(deadline=None, max_examples=25)
@given(dense=convolutions(), rank=st.integers(1, 2), batch=st.sampled_from([(), (2,)]))
def test_convolution(dense, rank, batch):
    low_rank = factorized(dense, rank)
    assert type(low_rank) is pf.layers.LowRankConv
    assert_same(low_rank, dense, [random_input(dense, 5, batch)])


@settings(deadline=None, max_examples=25)
@given(dense=transposed_convolutions(), rank=st.integers(1, 2), batch=st.sampled_from([(), (2,)]))
def test_transposed_convolution(dense, rank, batch):
    low_rank = factorized(dense, rank)
    assert type(low_rank) is pf.layers.LowRankConvTranspose
    assert_same(low_rank, dense, [random_input(dense, 3, batch)])


@settings(deadline=None, max_examples=15)
@given(stride=st.integers(1, 4), extra=st.integers(0, 3), dims=st.integers(1, 3), batch=st.booleans())
def test_output_size_of_a_transposed_convolution(stride, extra, dims, batch):
    torch.manual_seed(0)
    dense = TRANSPOSED[dims](3, 4, 2, stride=stride, padding=1, dtype=torch.float64)
    size = [stride * 2 + min(extra, stride - 1)] * dims  # the smallest, or up to a stride more
    x = torch.randn(*([2] if batch else []), 3, *[3] * dims, dtype=torch.float64)
    low_rank = factorized(dense)
    assert list(low_rank(x, output_size=size).shape[-dims:]) == size
    assert_same(low_rank, dense, [x], lambda layer, x: layer(x, output_size=size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
)
def test_low_precision(kind, dtype):
    torch.manual_seed(0)
    dense = kind(6, 8, 3, stride=2, padding=1, groups=2, dtype=dtype)
    assert_same(factorized(dense), dense, [random_input(dense, 4)])


def test_channels_last():
    torch.manual_seed(0)
    dense = nn.Conv2d(6, 8, 3, groups=2, dtype=torch.float64).to(memory_format=torch.channels_last)
    x = random_input(dense, 5).to(memory_format=torch.channels_last)
    low_rank = factorized(dense)
    assert low_rank(x).is_contiguous(memory_format=torch.channels_last)
    assert_same(low_rank, dense, [x])
