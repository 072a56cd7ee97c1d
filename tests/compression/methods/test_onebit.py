"""OneBitSGD: two means for each column and one sign for each element."""

import torch
from torch import Tensor

from driver import drive, normal
from pufferfish.compression import OneBitSGD


def slow(M: Tensor) -> Tensor:
    result = torch.zeros_like(M)
    for matrix, out in zip(M, result, strict=True):
        for j in range(matrix.shape[1]):
            column = matrix[:, j].tolist()
            high, low = [v for v in column if v >= 0], [v for v in column if v < 0]
            for i, v in enumerate(column):
                out[i, j] = sum(high) / len(high) if v >= 0 else sum(low) / len(low)
    return result


def test_is_the_equation() -> None:
    xs = normal(2, 5, 3, workers=3)
    xs[0][0, :, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0])  # none below zero
    xs[1][1, :, 2] = -xs[1][1, :, 2].abs()  # all below zero
    xs[2][0] = 0
    mean, rests, meter = drive(OneBitSGD(), xs)
    torch.testing.assert_close(mean, sum(slow(x) for x in xs) / 3)
    for x, rest in zip(xs, rests, strict=True):
        torch.testing.assert_close(rest, x - slow(x))
    assert meter.collective_bytes["all_gather"] == 2 * (2 + 2 * 4 * 3)
