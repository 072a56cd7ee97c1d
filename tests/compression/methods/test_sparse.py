"""TopK: the largest elements, found by a sample."""

import pytest
import torch

from driver import drive, normal
from pufferfish.compression import TopK


def test_a_sample_finds_the_largest_by_and_large() -> None:
    """Of 3 × 50,000 elements 3 × 500 are sent: nothing that is far from the largest, and most of those."""
    xs = normal(3, 50_000, workers=2)
    xs[1][1] *= 100  # rows have bounds of their own
    mean, rests, meter = drive(TopK(k=0.01, sample=0.2), xs)
    sent = [x - rest for x, rest in zip(xs, rests, strict=True)]
    assert torch.equal(mean, (sent[0] + sent[1]) / 2)
    for x, s in zip(xs, sent, strict=True):
        assert torch.equal(s[s != 0], x[s != 0])  # whole or not at all
        bound = x.abs().topk(1000).values[:, -1:]
        assert (x.abs()[s != 0] >= bound.expand_as(x)[s != 0]).all()
        assert 1200 <= int((s != 0).sum()) <= 1500
        assert ((s != 0).sum(1) > 350).all()
    assert meter.collective_bytes["all_gather"] == 3 * 500 * 8


@pytest.mark.parametrize("seed", range(3))
def test_too_many_elements_wait_for_later_steps(seed: int) -> None:
    """Equal elements are all as large as the bound; about a tenth goes in each of 40 steps, and none is forgotten."""
    method, error = TopK(k=0.1, sample=0.7), torch.zeros(2, 1000)
    times = torch.zeros(2, 1000)
    for step in range(40):
        mean, (error,), _ = drive(method, [torch.ones(2, 1000) + error], step=step, seed=seed)
        times += mean != 0
        assert 100 < (mean != 0).sum() <= 200
    assert times.sum(1).min() > 3000
    assert times.min() >= 1


def test_too_few_leave_space() -> None:
    x = torch.zeros(2, 10_000)
    x[0, 17], x[0, 0], x[1, 9_999] = 3.0, -1e-30, 5.0
    mean, (rest,), meter = drive(TopK(k=0.01, sample=0.7), [x])
    assert torch.equal(mean, x)  # all that is not zero
    assert not rest.any()
    assert meter.collective_bytes["all_gather"] == 200 * 8


def test_small_samples_are_made_large_enough() -> None:
    """Where 64 of the largest cannot be in a sample, it is all of them: the exact ones."""
    xs = normal(2, 500, workers=1)
    given, exact = (drive(TopK(k=0.1, sample=s), xs).mean for s in (0.01, 1.0))
    assert torch.equal(given, exact)
