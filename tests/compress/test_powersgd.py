"""Orthonormal rows, whatever they are made of."""

import pytest
import torch
from driver import State, drive, normal
from torch import Tensor

from pufferfish.compress import PowerSGD, Turn
from pufferfish.compress.powersgd import orthonormal


def turn(step: int = 0, rank: int = 0) -> Turn:
    return Turn(rank=rank, size=2, step=step, names=("w",))


def off(x: Tensor) -> float:
    """How far the rows are from orthonormal."""
    return float((x.double() @ x.double().mT - torch.eye(x.shape[1])).abs().max())


@pytest.mark.parametrize("shape", [(3, 4, 500), (1, 1, 7), (2, 8, 9), (5, 32, 64)])
def test_the_span_is_that_of_a_qr(shape: tuple[int, int, int]) -> None:
    rows = normal(*shape, workers=1)[0] * torch.logspace(-12, 12, shape[1])[:, None]
    x = orthonormal(rows, turn())
    assert off(x) < 1e-5
    Q = torch.linalg.qr(rows.double().mT).Q
    torch.testing.assert_close(x.double().mT @ x.double(), Q @ Q.mT, atol=2e-5, rtol=0)


def test_zeros_and_what_is_double_become_something_new() -> None:
    for step in range(50):
        a, b = normal(1, 9, workers=2, seed=step)
        rows = torch.stack([torch.cat([a, 0 * a, b]), torch.cat([a, 3 * a, -a]), torch.zeros(3, 9)])
        x = orthonormal(rows, turn(step))
        assert x.isfinite().all()
        sizes = torch.linalg.svdvals(x.double())
        assert (sizes <= 1 + 1e-6).all()  # never longer, or it would be no contraction
        assert (sizes > 0.3).all()
        left = rows - rows @ x.mT @ x
        assert (left.norm(dim=2) <= 1e-5 * rows.norm(dim=2)).all()  # what was there is in the span


def test_no_more_room_than_rows() -> None:
    """Where noise has to fill nearly all of a space, also by bad luck: no NaN and nothing longer than 1."""
    x = orthonormal(torch.zeros(5000, 4, 5), turn())
    assert x.isfinite().all()
    assert torch.linalg.matrix_norm(x.double(), 2).max() < 1 + 1e-6


def test_new_directions_are_the_same_everywhere_and_others_every_time() -> None:
    zero = torch.zeros(1, 2, 6)
    assert torch.equal(orthonormal(zero, turn(3, rank=0)), orthonormal(zero, turn(3, rank=1)))
    assert not torch.equal(orthonormal(zero, turn(3)), orthonormal(zero, turn(4)))


def test_a_direction_of_which_there_was_nothing_is_found_later() -> None:
    """The gradient is of rank 1 for a while, then of rank 2."""
    u, v = normal(1, 20, 2, workers=1)[0], normal(1, 30, 2, workers=1, seed=1)[0]
    states: list[State] = [{}]
    for step in range(8):
        M = u[..., : 1 + step // 4] @ v[..., : 1 + step // 4].mT
        _, (rest,), _ = drive(PowerSGD(rank=2), [M], states, step)
        if step % 4 > 0:
            assert rest.norm() < 1e-4 * M.norm()


def test_sums_may_lie_in_what_was_given_away() -> None:
    """With one worker the answer is the tensor that was sent."""
    (M,) = normal(2, 12, 10, workers=1)
    step = PowerSGD(rank=2).compress(M.clone(), turn())
    message = next(step)
    try:
        while True:
            message = step.send(message.tensor)
    except StopIteration as end:
        mean, rest = end.value
    torch.testing.assert_close(2 * mean + rest, M)  # of two workers the other one sent zeros
