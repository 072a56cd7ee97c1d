"""TernGrad: three values, one scale for all workers, sums of integers."""

import math

import pytest
import torch
from torch import Tensor

from driver import drive, normal
from pufferfish.compression import StepContext, TernGrad


def slow(g: Tensor, chance: Tensor, s: list[float]) -> Tensor:
    """v/s and a random number from 0 to 1, rounded down: up or down by the chance of the fraction."""
    result = torch.zeros_like(g)
    for row in range(g.shape[0]):
        for i, v in enumerate(g[row].tolist()):
            if s[row] > 0:
                result[row, i] = s[row] * min(1, math.floor(v / s[row] + float(chance[row, i])))
    return result


def clipped(g: Tensor, clip: float) -> Tensor:
    rows = []
    for row in g.tolist():
        sigma = math.sqrt(sum(v * v for v in row) / len(row))
        rows.append([max(-clip * sigma, min(clip * sigma, v)) for v in row])
    return torch.tensor(rows)


@pytest.mark.parametrize("clip", [None, 1.5])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_is_the_equation(workers: int, clip: float | None) -> None:
    gs = normal(3, 19, workers=workers)
    for g in gs:
        g[1] = 0
    mean, _, meter = drive(TernGrad(clip=clip), gs, step=7)
    cut = gs if clip is None else [clipped(g, clip) for g in gs]
    s = [max(float(g[row].abs().max()) for g in cut) for row in range(3)]
    names = ("t0", "t1", "t2")
    streams = [StepContext(worker, workers, 7, names).own_rng for worker in range(workers)]
    chances = [torch.empty(3, 19).uniform_(1, 2, generator=stream) - 1 for stream in streams]
    sent = [slow(g, chance, s) for g, chance in zip(cut, chances, strict=True)]
    torch.testing.assert_close(mean, sum(sent) / workers)
    shard = -(-19 // (8 * workers)) * 8
    assert meter.collective_bytes["all_to_all"] == 3 * workers * shard * 2 // 8
    assert meter.collective_bytes["all_gather"] == 3 * (4 + shard * {1: 2, 2: 3, 5: 4}[workers] // 8)


def test_more_workers_than_a_byte_can_count() -> None:
    """The sums of all-minus and all-plus elements are the smallest and the largest."""
    g = torch.tensor([[-2.0], [2.0]])
    torch.testing.assert_close(drive(TernGrad(), [g] * 128).mean, g)


def test_a_tensor_of_equal_elements_is_not_clipped_away() -> None:
    assert torch.equal(drive(TernGrad(), [torch.full((1, 1), 3.0)]).mean, torch.full((1, 1), 3.0))
