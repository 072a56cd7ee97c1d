"""Orthonormal rows, whatever they are made of."""

import pytest
import torch
from torch import Tensor

from driver import State, drive, normal
from pufferfish.compression import Aggregator, PowerSGD, Turn
from pufferfish.compression.method import Together
from pufferfish.compression.methods.orthonormal import SHIFTS, orthonormal


def off(x: Tensor) -> float:
    """How far the rows are from orthonormal."""
    return float((x.double() @ x.double().mT - torch.eye(x.shape[1])).abs().max())


@pytest.mark.parametrize("shape", [(3, 4, 500), (1, 1, 7), (2, 8, 9), (5, 32, 64)])
def test_the_span_is_that_of_a_qr(shape: tuple[int, int, int]) -> None:
    rows = normal(*shape, workers=1)[0] * torch.logspace(-12, 12, shape[1])[:, None]
    (x,) = orthonormal([rows])
    assert off(x) < 1e-5
    Q = torch.linalg.qr(rows.double().mT).Q
    torch.testing.assert_close(x.double().mT @ x.double(), Q @ Q.mT, atol=2e-5, rtol=0)


def test_zeros_and_what_is_double_become_something_new() -> None:
    for step in range(50):
        a, b = normal(1, 9, workers=2, seed=step)
        rows = torch.stack([torch.cat([a, 0 * a, b]), torch.cat([a, 3 * a, -a]), torch.zeros(3, 9)])
        (x,) = orthonormal([rows], step)
        assert x.isfinite().all()
        sizes = torch.linalg.svdvals(x.double())
        assert (sizes <= 1 + 1e-6).all()  # never longer, or it would be no contraction
        assert (sizes > 0.3).all()
        left = rows - rows @ x.mT @ x
        assert (left.norm(dim=2) <= 1e-5 * rows.norm(dim=2)).all()  # what was there is in the span


def test_no_more_room_than_rows() -> None:
    """Where noise has to fill nearly all of a space, also by bad luck: no NaN and nothing longer than 1."""
    for step in range(SHIFTS):  # all noise that there is for this shape
        (x,) = orthonormal([torch.zeros(1, 4, 5)], step)
        assert x.isfinite().all()
        assert torch.linalg.matrix_norm(x.double(), 2).max() < 1 + 1e-6


def test_new_directions_are_others_every_time() -> None:
    zero = torch.zeros(1, 2, 6)
    (x,), (again,), (later,) = (orthonormal([zero], step) for step in (3, 3, 4))
    assert torch.equal(x, again)
    assert not torch.equal(x, later)


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1e20, 1e38])
def test_sizes_do_not_matter(size: float) -> None:
    """From the smallest number that fp32 has to the largest, beside ordinary rows."""
    rows = normal(1, 3, 40, workers=1)[0].clamp(-3, 3)
    rows[0, 1] = rows[0, 1].sign() * size
    (x,) = orthonormal([rows])
    assert off(x) < 1e-5
    left = rows.double() - rows.double() @ x.double().mT @ x.double()
    assert (left.norm(dim=2) <= 1e-5 * rows.double().norm(dim=2)).all()


def test_many_at_once_are_each_alone() -> None:
    """Of several shapes, ranks and dtypes, in any order."""
    shapes = [(2, 4, 30), (1, 2, 9), (3, 4, 30), (1, 4, 50), (1, 2, 30), (1, 4, 30)]
    rows = [normal(*shape, workers=1, seed=i)[0] for i, shape in enumerate(shapes)]
    rows.append(rows[0].double())
    found = orthonormal(rows, 5)
    for x, given in zip(found, rows, strict=True):
        (alone,) = orthonormal([given], 5)
        assert x.dtype == given.dtype
        torch.testing.assert_close(x, alone, rtol=0, atol=1e-6)


def test_small_work_of_all_tensors_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Cholesky factorization for a step, however many shapes there are."""
    calls: list[torch.Size] = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda x: calls.append(x.shape) or cholesky(x))
    aggregator = Aggregator(PowerSGD(rank=2), smallest=0)
    given = {f"w{i}": normal(8 + i % 3, 10 + i, workers=1, seed=i)[0] for i in range(5)}
    aggregator(given)
    assert calls == [torch.Size([5, 2, 2])]


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
    step = PowerSGD(rank=2).compress(M.clone(), Turn(rank=0, size=2, step=0, names=("w",)))
    message = next(step)
    try:
        while True:
            answer = message.work([message.tensor], 0)[0] if isinstance(message, Together) else message.tensor
            message = step.send(answer)
    except StopIteration as end:
        mean, rest = end.value
    torch.testing.assert_close(2 * mean + rest, M)  # of two workers the other one sent zeros
