"""Signum: signs of a momentum. EFSignSGD: signs with error feedback at the workers and at the owners of shards."""

import pytest
import torch
from torch import Tensor

from driver import State, drive, normal
from pufferfish.compression.check_compressor import check_compressor
from pufferfish.compression.methods.signum import EFSignSGD, Signum


@pytest.mark.parametrize("method", [Signum(), EFSignSGD()])
def test_properties(method: Signum) -> None:
    check_compressor(method, sizes=(1, 3), draws=20)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_majority_of_the_signs_of_momentum(workers: int) -> None:
    states: list[State] = [{} for _ in range(workers)]
    m = [torch.zeros(2, 11) for _ in range(workers)]
    for step in range(4):
        gs = normal(2, 11, workers=workers, seed=step)
        mean = drive(Signum(momentum=0.6), gs, states, step).mean
        m = [0.6 * old + 0.4 * g for old, g in zip(m, gs, strict=True)]
        votes = sum(x.sign() for x in m)
        votes[votes == 0] = 1 if step % 2 == 0 else -1
        assert torch.equal(mean, votes.sign())


def test_momentum_outlives_one_step_against_it() -> None:
    states: list[State] = [{}]
    for step, g in enumerate([1.0, 1.0, 1.0, -1.0]):
        mean = drive(Signum(), [torch.full((1, 3), g)], states, step).mean
    assert (mean == 1).all()


def slow_sign(p: Tensor) -> Tensor:
    """‖p‖₁/d · sgn(p) of every row, where a zero counts as +."""
    return torch.stack([row.abs().sum() / len(row) * torch.where(row < 0, -1.0, 1.0) for row in p])


def test_error_feedback_at_both_ends_is_the_equations() -> None:
    """21 elements in shards of 8: owners 0 and 1 have 8 of them, owner 2 has 5, owner 3 none."""
    workers, d = 4, 21
    states: list[State] = [{} for _ in range(workers)]
    owner = torch.zeros(2, d)
    for step in range(3):
        ps = normal(2, d, workers=workers, seed=step)
        ps[0][0, 3] = 0
        mean, rests, meter = drive(EFSignSGD(), ps, states, step)
        total = sum(slow_sign(p) for p in ps) / workers + owner
        back = torch.cat([slow_sign(total[:, a : min(a + 8, d)]) for a in (0, 8, 16)], 1)
        owner = total - back
        torch.testing.assert_close(mean, back)
        torch.testing.assert_close(torch.cat([s["owner"] for s in states], 1)[:, :d], owner)
        for p, rest in zip(ps, rests, strict=True):
            torch.testing.assert_close(rest, p - slow_sign(p))
    assert (meter.collective_bytes["all_gather"], meter.collective_bytes["all_to_all"]) == (
        2 * (1 + 4),
        4 * 2 * (1 + 4),
    )


def test_without_the_owners_error_feedback_the_error_stays() -> None:
    """Four workers with constant gradients: distance of the applied mean from theirs, after 100 steps."""

    def error(second: bool) -> float:
        gs = normal(1, 200, workers=4)
        errors = [torch.zeros_like(g) for g in gs]
        states: list[State] = [{} for _ in gs]
        applied = torch.zeros_like(gs[0])
        for step in range(100):
            ps = [g + e for g, e in zip(gs, errors, strict=True)]
            mean, errors, _ = drive(EFSignSGD(), ps, states if second else None, step)
            applied += mean
        target = sum(gs) / 4
        return float((applied / 100 - target).norm() / target.norm())

    assert error(second=True) < 0.1
    assert error(second=False) > 0.25


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"Signum: momentum=1\.0"):
        Signum(momentum=1.0)
