"""TwoStage: both roundings against loops, exchange="all_gather" against a plain mean, and collectives of all methods."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import low_bits
from driver import State, drive, normal
from pufferfish.compression import (
    DGC,
    QSGD,
    AlternatingPowerSGD,
    Atomo,
    BlockFP8,
    BlockInt8,
    BlockRandomK,
    EFSignSGD,
    Int2,
    Int4,
    LoCo,
    Method,
    NoCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    SignSGD,
    Signum,
    SparseLoCo,
    TernGrad,
    Threshold,
    TopK,
)  # fmt: skip

Reference = Callable[[np.ndarray], np.ndarray]


def nearest(values: Tensor) -> Reference:
    """The nearest of the values, whose largest is that of the block."""
    grid = values[values.isfinite()].unique().double().numpy()

    def rounded(block: np.ndarray) -> np.ndarray:
        scale = np.abs(block).max() / grid.max()
        found: np.ndarray = grid[np.abs(block[:, None] / scale - grid).argmin(1)] * scale
        return found

    return rounded


def sign(block: np.ndarray) -> np.ndarray:
    """‖p‖₁/d · sgn(p), where a zero counts as +."""
    found: np.ndarray = np.abs(block).mean() * np.where(block < 0, -1.0, 1.0)
    return found


def slow(x: Tensor, reference: Reference, block: int, pad: bool) -> Tensor:
    """Round every block of x; the last one is padded with zeros, or is a short one."""
    result = x.double().numpy().copy()
    for row in result:
        for a in range(0, len(row), block):
            part = row[a : a + block]
            if part.any():
                part[:] = reference(np.pad(part, (0, (block - len(part)) * pad)))[: len(part)]
    return torch.tensor(result, dtype=torch.float32)


@pytest.mark.parametrize(
    ("method", "reference", "blocks"),
    [
        (EFSignSGD(), sign, (27, 16)),  # of the whole gradient, and of a shard
        (BlockInt8(block=8), nearest(torch.arange(-127.0, 128.0)), (7, 7)),  # a shard of 14 is two blocks of 7
        (BlockFP8(block=8), nearest(torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()), (7, 7)),
        (Int4(block=8), low_bits.int4, (8, 8)),
        (Int2(block=8), low_bits.int2, (8, 8)),
    ],
    ids=lambda x: repr(x) if isinstance(x, Method) else "",
)  # fmt: skip
def test_both_roundings_equal_the_loop(method: Method, reference: Reference, blocks: tuple[int, int]) -> None:
    """27 elements for two owners, each of which keeps the error of its own rounding."""
    workers, d, pad = 2, 27, not isinstance(method, EFSignSGD)
    states: list[State] = [{}, {}]
    owner = torch.zeros(2, d)
    for step in range(3):
        xs = normal(2, d, workers=workers, seed=step)
        xs[0][1, :16] = 0
        mean, rests, _ = drive(method, xs, states, step)
        sent = [slow(x, reference, blocks[0], pad) for x in xs]
        for x, own, rest in zip(xs, sent, rests, strict=True):
            torch.testing.assert_close(rest, x - own)
        total = sum(sent) / workers + owner
        back = slow(total, reference, blocks[1], pad)
        owner = total - back
        torch.testing.assert_close(mean, back)
        torch.testing.assert_close(torch.cat([s["owner"] for s in states], 1)[:, :d], owner)


@pytest.mark.parametrize(
    "method", [BlockInt8(block=4), BlockFP8(block=4), Int4(block=8), Int2(block=8)], ids=repr
)
def test_sizes_from_the_smallest_to_the_largest(method: Method) -> None:
    x = torch.tensor([[1e15, -1.0, 1e-3, 0.0, 0, 0, 0, 0, 1e-38, 1e-42, 0.0, -1e-40, 0, 0, 0, 0]])
    mean, (rest,), _ = drive(method, [x])
    assert mean.isfinite().all()
    assert mean[0, 0] == pytest.approx(1e15, rel=4e-3)
    assert rest is not None
    assert rest.norm() <= x.norm()


def test_one_magnitude_is_sent_whole() -> None:
    """The root mean square of equal numbers may be rounded to more than they are."""
    for value in (0.1, 0.3, 0.7, 1 / 3, 1e-20):
        x = torch.tensor([[value, -value] * 12])
        torch.testing.assert_close(drive(Int2(block=8), [x]).mean, x, rtol=4e-3, atol=0)


WITH_ERROR_FEEDBACK = [EFSignSGD(), BlockInt8(block=8), BlockFP8(block=8)]


@pytest.mark.parametrize("method", WITH_ERROR_FEEDBACK, ids=repr)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_message_to_all_workers_loses_nothing(method: Method, workers: int) -> None:
    """A worker sends x − rest; all workers apply the mean of what was sent."""
    states: list[State] = [{} for _ in range(workers)]
    for step in range(2):
        xs = normal(2, 27, workers=workers, seed=step)
        mean, rests, meter = drive(method, xs, states, step, exchange="all_gather")
        sent = [x - rest for x, rest in zip(xs, rests, strict=True)]
        torch.testing.assert_close(mean, sum(sent) / workers)
        for x, own in zip(xs, sent, strict=True):
            alone = drive(method, [x], exchange="all_gather").mean
            torch.testing.assert_close(own, alone)
            assert (x - own).norm() < x.norm()
        assert not any(states), "owners have no error feedback"
        assert meter.messages == 1
    signs, blocks = 2 * (4 + 4), 2 * (28 + 4 * 4)  # 27 elements in 4 bytes of bits, or in 4 blocks of 7
    assert meter.collective_bytes["all_gather"] == (signs if isinstance(method, EFSignSGD) else blocks)
    assert sum(meter.collective_bytes.values()) == meter.collective_bytes["all_gather"]


@pytest.mark.parametrize("method", [SignSGD(), Signum(momentum=0.0)], ids=repr)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_worker_counts_the_votes(method: Method, workers: int) -> None:
    states: list[State] = [{} for _ in range(workers)]
    for step in range(3):
        torch.manual_seed(step)
        xs = [torch.randint(-1, 2, (2, 21)).float() for _ in range(workers)]
        even = 1.0 if step % 2 == 0 else -1.0
        votes = sum(torch.where(x == 0, even, x) for x in xs)
        mean, _, meter = drive(method, xs, states, step, exchange="all_gather")
        assert torch.equal(mean, torch.where(votes == 0, even, votes.sign()))
        two = drive(method, xs, step=step).mean  # through owners it is the same
        assert torch.equal(mean, two)
    assert meter.collective_bytes["all_gather"] == 2 * 3
    assert sum(meter.collective_bytes.values()) == meter.collective_bytes["all_gather"]


def test_levels_are_rounded_once() -> None:
    """Right on average, with the noise of one rounding, and the mean is one of single workers' values."""
    b, workers = 4000, 2
    xs = [x.expand(b, 16) for x in normal(1, 16, workers=workers)]
    mean, _, meter = drive(QSGD(levels=3), xs, exchange="all_gather")
    target = (xs[0] + xs[1]) / 2
    assert ((mean - target).mean(0).abs() < 5 * mean.std(0) / b**0.5).all()
    grid = torch.arange(-3, 4)
    values = ((xs[0][0].norm() * grid[:, None] + xs[1][0].norm() * grid) / 3 / workers).flatten()
    assert ((mean[:100, :, None] - values).abs().amin(-1) < 1e-5).all()
    assert meter.collective_bytes["all_gather"] == b * (16 * 3 // 8 + 4)
    assert mean.var(0).sum() < drive(QSGD(levels=3), xs).mean.var(0).sum()


ALL: list[Method] = [
    NoCompression(), PowerSGD(2), AlternatingPowerSGD(2), Atomo(2), TopK(), RandomK(), RandomK(coordinates="own"),
    BlockRandomK(), BlockRandomK(coordinates="own"), Threshold(), DGC(), OneBitSGD(), SignSGD(), Signum(),
    EFSignSGD(), QSGD(), TernGrad(), BlockInt8(), BlockFP8(), Int4(), Int2(), LoCo(),
    SparseLoCo(),
]  # fmt: skip


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_methods_use_the_chosen_collective(method: Method) -> None:
    """An all-to-all is followed by an all-gather; otherwise only the chosen collective is used."""
    assert method.exchanges
    (x, y) = normal(2, 8, 9, workers=2)
    for exchange in method.exchanges:
        shaped = [z if method.layout == "matrices" else z.flatten(1) for z in (x, y)]
        used = {
            key for key, n in drive(method, shaped, exchange=exchange).meter.collective_bytes.items() if n
        }
        assert used == ({"all_to_all", "all_gather"} if exchange == "all_to_all" else {exchange})
