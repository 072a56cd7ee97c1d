"""Threshold: ±τ for elements beyond τ, with messages of different sizes on the workers."""

import torch
from torch import Tensor

from driver import drive, normal
from pufferfish.compression import Threshold


def slow(x: Tensor, tau: float) -> Tensor:
    return torch.tensor([[tau if v > tau else -tau if v < -tau else 0.0 for v in row] for row in x.tolist()])


def test_is_the_equation() -> None:
    xs = [x * scale for x, scale in zip(normal(3, 40, workers=3), (0.1, 1.0, 3.0), strict=True)]
    xs[1][0, :3] = torch.tensor([0.5, -0.5, 0.0])  # τ itself is not beyond τ
    sent = [slow(x, 0.5) for x in xs]
    mean, rests, meter = drive(Threshold(tau=0.5), xs)
    torch.testing.assert_close(mean, sum(sent) / 3)
    for x, own, rest in zip(xs, sent, rests, strict=True):
        torch.testing.assert_close(rest, x - own)
    counts = [int((own != 0).sum()) for own in sent]
    assert len(set(counts)) == 3
    assert meter.collective_bytes["all_gather"] == 8 + 4 * max(counts)


def test_nothing_beyond_the_threshold() -> None:
    xs = normal(2, 8, workers=2)
    mean, rests, meter = drive(Threshold(tau=100.0), xs)
    assert not mean.any()
    assert torch.equal(rests[1], xs[1])
    assert meter.messages == 1


def test_small_gradients_are_sent_later() -> None:
    """A gradient below τ is not lost: error feedback sends it at its own rate."""
    g, error, applied = torch.tensor([[0.3, -0.05, 0.0]]), torch.zeros(1, 3), torch.zeros(1, 3)
    for _ in range(100):
        mean, (error,), _ = drive(Threshold(tau=0.5), [g + error])
        applied += mean
    torch.testing.assert_close(applied / 100, g, atol=0.006, rtol=0)
