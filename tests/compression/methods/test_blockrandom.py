"""BlockRandomK: runs of neighbouring elements that wrap around the end, all equally likely."""

import pytest
import torch

from driver import drive, normal
from pufferfish.compression import BlockRandomK


def run_from(start: int, k: int, d: int) -> list[int]:
    return sorted((start + j) % d for j in range(k))


@pytest.mark.parametrize("coordinates", ["shared", "own"])
def test_all_runs_are_equally_likely_including_those_that_wrap_around(coordinates: str) -> None:
    d, k, b = 5, 3, 2000
    xs = normal(b, d, workers=2)
    mean, rests, meter = drive(BlockRandomK(k=k, coordinates=coordinates), xs)
    sent = [x - rest for x, rest in zip(xs, rests, strict=True)]
    torch.testing.assert_close(mean, sum(sent) / 2)
    where = [(s != 0).tolist() for s in sent]
    runs = [run_from(start, k, d) for start in range(d)]
    for worker in where:
        starts = [runs.index([j for j in range(d) if row[j]]) for row in worker]  # raises if it is not a run
        for start in range(d):  # expected 400 of 2000, standard deviation 18
            assert 310 < starts.count(start) < 490
    assert (where[0] == where[1]) is (coordinates == "shared")
    own = coordinates == "own"
    assert meter.collective_bytes["all_gather" if own else "all_reduce"] == b * (4 * k + 4 * own)


def test_scaled_by_what_is_left_out() -> None:
    (x,) = normal(1, 10, workers=1)
    mean = drive(BlockRandomK(k=4, scale=True), [x]).mean
    sent = mean != 0
    assert sent.sum() == 4
    torch.testing.assert_close(mean[sent], x[sent] * 10 / 4)


def test_all_of_it_is_plain_averaging() -> None:
    xs = normal(3, 7, workers=3)
    mean, rests, _ = drive(BlockRandomK(k=1.0, coordinates="own"), xs)
    torch.testing.assert_close(mean, sum(xs) / 3)
    assert not any(rest.any() for rest in rests)
