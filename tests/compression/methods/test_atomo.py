"""ATOMO: probabilities of minimal variance, and exactly r terms every time."""

import pytest
import torch

from driver import drive, normal
from pufferfish.compression import Atomo


def water(sigma: list[float], r: int) -> list[float]:
    """min(1, c·σ) that add up to r, with c by bisection."""
    low, high = 0.0, 1e9
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1.0, c * s) for s in sigma) < r else (low, c)
    return [min(1.0, c * s) for s in sigma]


@pytest.mark.parametrize(
    ("r", "sizes"),
    [
        (2, [4.0, 2.0, 1.0, 0.5, 0.5]),
        (3, [100.0, 50.0, 1.0, 0.9, 0.8]),
        (3, [5.0, 4.0, 3.0, 0.2, 0.2]),
        (1, [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_each_term_is_drawn_with_its_probability_and_at_most_once(r: int, sizes: list[float]) -> None:
    """A diagonal matrix shows its terms: 4000 draws, one for each tensor of a batch."""
    b, sigma = 4000, torch.tensor(sizes)
    mean = drive(Atomo(rank=r), [torch.diag(sigma).expand(b, 5, 5)]).mean
    terms = mean.diagonal(dim1=1, dim2=2)
    assert not (mean - torch.diag_embed(terms)).any()
    taken = terms.abs() > 1e-6
    assert (taken.sum(1) == r).all()
    p = torch.tensor(water(sigma.tolist(), r))
    torch.testing.assert_close(terms, torch.where(taken, sigma / p, 0.0))
    assert ((taken.float().mean(0) - p).abs() < 4 * (p * (1 - p) / b).sqrt() + 1e-6).all()


def test_low_rank_is_exact_and_messages_keep_their_size() -> None:
    u, v = normal(2, 7, 1, workers=1)[0], normal(2, 1, 9, workers=1, seed=1)[0]
    x = u @ v
    x[1] = 0
    mean, _, meter = drive(Atomo(rank=3), [x, x])
    torch.testing.assert_close(mean, x, atol=1e-5, rtol=1e-5)
    assert meter.collective_bytes["all_gather"] == 2 * 3 * (7 + 9) * 4
