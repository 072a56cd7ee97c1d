"""BlockInt8 and BlockFP8 against the nearest of all 256 values."""

import pytest
import torch
from torch import Tensor

from driver import State, drive, normal
from pufferfish.compression import Method
from pufferfish.compression.check_compressor import check_compressor
from pufferfish.compression.methods.blocks import BlockFP8, BlockInt8

INT8 = torch.arange(-127.0, 128.0)
FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FP8 = FP8[FP8.isfinite()].unique()


@pytest.mark.parametrize("method", [BlockInt8(), BlockInt8(block=7), BlockFP8()])
def test_properties(method: Method) -> None:
    check_compressor(method, sizes=(1, 3), draws=20)


def slow(x: Tensor, values: Tensor, block: int) -> Tensor:
    """Every block by its largest element on the grid of values."""
    result = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for a in range(0, x.shape[1], block):
            part = x[row, a : a + block]
            scale = part.abs().max() / values.max()
            if scale > 0:
                nearest = (part[:, None] / scale - values).abs().argmin(1)
                result[row, a : a + block] = values[nearest] * scale
    return result


@pytest.mark.parametrize(("method", "values"), [(BlockInt8(block=8), INT8), (BlockFP8(block=8), FP8)])
def test_both_roundings_are_to_the_nearest(method: Method, values: Tensor) -> None:
    """27 elements for two owners are 14 for each, which at most 8 at a time are two blocks of 7."""
    workers, d = 2, 27
    states: list[State] = [{}, {}]
    owner = torch.zeros(2, d)
    for step in range(3):
        xs = normal(2, d, workers=workers, seed=step)
        xs[0][1, :16] = 0
        mean, rests, meter = drive(method, xs, states, step)
        for x, rest in zip(xs, rests, strict=True):
            torch.testing.assert_close(rest, x - slow(x, values, 7))
        total = sum(slow(x, values, 7) for x in xs) / workers + owner
        back = slow(total, values, 7)
        owner = total - back
        torch.testing.assert_close(mean, back)
        torch.testing.assert_close(torch.cat([s["owner"] for s in states], 1)[:, :d], owner)
    assert (meter.collective_bytes["all_gather"], meter.collective_bytes["all_to_all"]) == (
        2 * (14 + 8),
        2 * 2 * (14 + 8),
    )


@pytest.mark.parametrize("method", [BlockInt8(), BlockFP8()])
def test_a_quarter_of_the_bytes(method: Method) -> None:
    xs = normal(1, 4096, workers=4)
    sent = drive(method, xs).meter.wire_bytes
    ring = 2 * 4 * 4096 * 3 / 4
    assert ring / sent == pytest.approx(4 / (1 + 4 / 256))  # 3.94


@pytest.mark.parametrize("method", [BlockInt8(block=4), BlockFP8(block=4)])
def test_sizes_from_the_smallest_to_the_largest(method: Method) -> None:
    x = torch.tensor([[1e15, -1.0, 1e-3, 0.0, 1e-38, 1e-42, 0.0, -1e-40]])
    mean, (rest,), _ = drive(method, [x])
    assert mean.isfinite().all()
    assert mean[0, 0] == pytest.approx(1e15)
    assert (rest.abs() <= x.abs()).all()


@pytest.mark.parametrize("block", [0, 2.5, True])
def test_settings(block: int) -> None:
    with pytest.raises(ValueError, match="BlockFP8: block="):
        BlockFP8(block=block)
