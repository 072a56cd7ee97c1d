"""TopK: the largest elements, found by a sample. RandomK: elements drawn without a full permutation."""

import pytest
import torch

from driver import drive, normal
from pufferfish.compression import TopK
from pufferfish.compression.methods.sparse import draw_indices


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


@pytest.mark.parametrize(("d", "k"), [(10, 1), (10, 3), (10, 7), (10, 10), (1, 1)])
def test_drawn_without_repeats_and_equally_often(d: int, k: int) -> None:
    b = 5000
    i = draw_indices(b, d, k, torch.Generator().manual_seed(0))
    assert i.shape == (b, k)
    hits = torch.zeros(b, d).scatter_add_(1, i, torch.ones(b, k))
    assert hits.max() == 1
    p = k / d
    assert ((hits.mean(0) - p).abs() <= 5 * (p * (1 - p) / b) ** 0.5).all()
