"""One factor a step, one message a step."""

import pytest
import torch

from driver import State, drive, normal
from pufferfish.compression.check_compressor import check_compressor
from pufferfish.compression.methods.alternating import AlternatingPowerSGD


def test_holds_what_every_method_holds() -> None:
    check_compressor(AlternatingPowerSGD(rank=2), sizes=(1, 3))


def test_is_the_equations() -> None:
    r, workers = 2, 3
    states: list[State] = [{} for _ in range(workers)]
    for step in range(4):
        xs = normal(2, 7, 5, workers=workers, seed=step)
        known = {key: x.clone() for key, x in states[0].items()}
        mean, rests, meter = drive(AlternatingPowerSGD(rank=r), xs, states, step)
        for i in range(2):
            M = [x[i].double() for x in xs]
            average = sum(M) / workers
            if step == 0:  # whatever Q it drew spans the rows of what it applies
                basis = torch.linalg.svd(mean[i].double()).Vh[:r]
                right = [m @ basis.T @ basis for m in [average, *M]]
            elif step % 2 == 0:
                Q = torch.linalg.qr(known["Q"][i].double()).Q
                right = [m @ Q @ Q.T for m in [average, *M]]
            else:
                P = torch.linalg.qr(known["P"][i].double()).Q
                right = [P @ P.T @ m for m in [average, *M]]
            torch.testing.assert_close(mean[i].double(), right[0], atol=1e-5, rtol=1e-4)
            for m, own, rest in zip(M, right[1:], rests, strict=True):
                torch.testing.assert_close(rest[i].double(), m - own, atol=1e-5, rtol=1e-4)
        assert meter.messages == 1
        assert meter.handed["all_reduce"] == 2 * 4 * r * (7 if step % 2 == 0 else 5)


def test_finds_the_best_directions_of_a_matrix_that_stays() -> None:
    (M,) = normal(1, 12, 10, workers=1)
    sigma = torch.linalg.svdvals(M[0])
    states: list[State] = [{}]
    for step in range(60):
        _, (rest,), _ = drive(AlternatingPowerSGD(rank=3), [M], states, step)
    assert rest.norm() == pytest.approx(float(sigma[3:].norm()), rel=0.02)


def test_zeros_and_a_step_that_was_dropped() -> None:
    """Parity goes by the step's number; a step that is not kept leaves the factors of those before."""
    states: list[State] = [{}]
    for step, kept in enumerate([True, True, False, True, True]):
        x = normal(1, 7, 5, workers=1, seed=step)[0] * (step != 1)
        mean, (rest,), _ = drive(
            AlternatingPowerSGD(rank=2), [x], states if kept else [dict(states[0])], step
        )
        assert mean.isfinite().all()
        torch.testing.assert_close(mean + rest, x)
        assert rest.norm() <= x.norm()


def test_settings() -> None:
    with pytest.raises(ValueError, match="AlternatingPowerSGD: rank=-1"):
        AlternatingPowerSGD(rank=-1)
