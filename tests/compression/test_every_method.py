"""Every method: our property tests, a slow reference of the paper's equations, and its true size on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pufferfish.compression import (
    QSGD,
    Aggregator,
    BFloat16,
    Float16,
    Gather,
    Method,
    NoCompression,
    PowerSGD,
    RandomK,
    SignSGD,
    Simulated,
    Sum,
    TopK,
    Turn,
)
from pufferfish.compression.check_compressor import check_compressor, gradients

METHODS = [
    NoCompression(),
    BFloat16(),
    Float16(),
    PowerSGD(rank=1),
    PowerSGD(rank=4),
    TopK(),
    TopK(k=3),
    TopK(k=1.0),
    RandomK(),
    RandomK(k=0.1, coordinates="own"),
    RandomK(k=0.1, scale=True),
    RandomK(k=0.1, coordinates="own", scale=True),
    SignSGD(),
    QSGD(),
    QSGD(levels=1, bucket=64),
    QSGD(levels=127),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_properties(method: Method) -> None:
    check_compressor(method, sizes=(1, 2, 4), draws=100)


def weight(size: int, step: int = 0) -> list[dict[str, Tensor]]:
    return [{"w": g["a.weight"]} for g in gradients(size, step)]


def test_power_sgd_equals_the_papers_loop() -> None:
    """One matrix, one worker after the other, in double precision."""
    W, r = 3, 2
    aggregator = Aggregator(PowerSGD(r), Simulated(W), smallest=0)
    memory = [torch.zeros(24, 36, dtype=torch.float64) for _ in range(W)]
    Q = None
    for step in range(4):
        given = weight(W, step)
        applied = aggregator.together(given)[0]["w"]
        M = [g["w"].double() + e for g, e in zip(given, memory, strict=True)]
        if Q is None:
            Q = torch.randn(36, r, generator=Turn(rank=0, size=W, step=0, names=("w",)).shared).double()
        P = torch.linalg.qr(sum(m @ Q for m in M) / W).Q
        own = [m.T @ P for m in M]
        Q = sum(own) / W
        memory = [m - P @ q.T for m, q in zip(M, own, strict=True)]
        torch.testing.assert_close(applied.double(), P @ Q.T, rtol=1e-4, atol=1e-5)
        for own_state, e in zip(aggregator.state_dict()["own"], memory, strict=True):
            torch.testing.assert_close(own_state["w"]["memory"].double(), e, rtol=1e-4, atol=1e-5)


def test_power_sgd_finds_low_rank_gradients_and_forgets_none() -> None:
    """A gradient of rank 2, then zero, then rank 3: directions that were lost come back."""
    aggregator = Aggregator(PowerSGD(3), Simulated(1), smallest=0)
    torch.manual_seed(0)
    for rank in (2, 2, 0, 3, 3, 3):
        g = torch.randn(20, rank) @ torch.randn(rank, 30)
        left = g
        for _ in range(3):
            left = left - aggregator({"w": left})["w"]
        assert left.norm() <= 1e-4 * max(1.0, float(g.norm())), rank


def test_top_k_sends_the_largest_and_keeps_the_others() -> None:
    aggregator = Aggregator(TopK(k=0.1), Simulated(2), smallest=0)
    memory = [torch.zeros(24, 36)] * 2
    for step in range(3):
        given = weight(2, step)
        applied = aggregator.together(given)[0]["w"]
        sent = []
        for worker, g in enumerate(given):
            x = g["w"] + memory[worker]
            smallest = x.abs().flatten().sort().values[-math.ceil(0.1 * x.numel())]
            sent.append(torch.where(x.abs() >= smallest, x, 0))
            memory[worker] = x - sent[-1]
        assert torch.equal(applied, (sent[0] + sent[1]) / 2)


@pytest.mark.parametrize("coordinates", ["shared", "own"])
def test_random_k_draws_every_element_equally_often(coordinates: str) -> None:
    aggregator = Aggregator(RandomK(0.25, coordinates), Simulated(2), smallest=0, memory=False)  # type: ignore[arg-type]
    ones = [{"w": torch.ones(40)}, {"w": torch.ones(40)}]
    hits = torch.zeros(40)
    both = 0
    for _ in range(400):
        drawn = aggregator.together(ones)[0]["w"]
        assert drawn.sum() == 10  # k of them, at full size, from each
        hits += drawn
        both += int((drawn == 1).sum())
    assert ((hits - 100).abs() < 45).all()  # 5 σ
    assert both == 4000 if coordinates == "shared" else 700 < both < 1300  # a chance of 1/16 for each


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_sign_sgd_is_the_majority(W: int) -> None:
    """Zeros and ties go with the parity of the step."""
    aggregator = Aggregator(SignSGD(), Simulated(W), smallest=0)
    for step in range(4):
        torch.manual_seed(step)
        given = [{"w": torch.randint(-1, 2, (7, 9)).float()} for _ in range(W)]
        even = 1.0 if step % 2 == 0 else -1.0
        votes = sum(torch.where(g["w"] == 0, even, g["w"].sign()) for g in given)
        expected = torch.where(votes == 0, even, votes.sign())
        assert torch.equal(aggregator.together(given)[0]["w"], expected)


def test_qsgd_gives_levels_of_its_norms() -> None:
    x = gradients(1)[0]["a.weight"].flatten()[:64]
    s = 5
    aggregator = Aggregator(QSGD(levels=s, bucket=64), Simulated(1), smallest=0)
    norms = []
    for _ in range(20):
        q = aggregator({"w": x})["w"]
        nonzero = q[q != 0]
        unit = nonzero.abs().min()
        levels = nonzero / unit
        torch.testing.assert_close(levels, levels.round(), rtol=1e-4, atol=1e-4)
        assert levels.abs().max() <= s
        norms.append(unit)
    assert len({round(float(n), 3) for n in norms}) > 1  # the second rounding has the first one's norm


def handed(method: Method, W: int, **options: int) -> dict[str, int]:
    """Bytes for one tensor of 4096 elements, without the agreement's two numbers."""
    aggregator = Aggregator(method, Simulated(W), **options)
    aggregator.together([{"w": torch.randn(64, 64)} for _ in range(W)])
    found = aggregator.meter.handed
    return found | {"all_reduce": found["all_reduce"] - 8}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (NoCompression(), (4 * 4096, 0, 0)),
        (BFloat16(), (2 * 4096, 0, 0)),
        (Float16(), (2 * 4096, 0, 0)),
        (PowerSGD(4), (4 * 4 * 128, 0, 0)),
        (TopK(0.01), (0, 8 * 41, 0)),
        (RandomK(0.01), (4 * 41, 0, 0)),
        (RandomK(0.01, "own"), (0, 8 * 41, 0)),
        (SignSGD(), (0, 4096 // 8 // 4, 4096 // 8)),
        (QSGD(levels=7), (0, 4096 // 2 // 4 + 4 * 2, 4096 // 2 + 4 * 8)),
        (QSGD(levels=1), (0, 4096 // 4 // 4 + 4 * 2, 4096 // 4 + 4 * 8)),
    ],
    ids=repr,
)
def test_size_on_the_wire(method: Method, expected: tuple[int, int, int]) -> None:
    found = handed(method, 4)
    assert (found["all_reduce"], found["all_gather"], found["all_to_all"]) == expected


@dataclass(frozen=True)
class Wrong(Method):
    """A method with one mistake."""

    mistake: str = ""

    sparse = True

    @property
    def kind(self) -> str:
        return "unbiased" if self.mistake == "biased" else "contraction"

    def compress(self, x, turn):  # type: ignore[no-untyped-def]
        if self.mistake == "global generator":
            torch.rand(1)
        if self.mistake == "grows":
            total = yield Sum(-x)
            return total / turn.size, 2 * x
        if self.mistake == "biased":
            total = yield Sum(0.9 * x * torch.empty_like(x).uniform_(0.5, 1.5, generator=turn.own))
            return total / turn.size, None
        if self.mistake == "own result":
            everyone = yield Gather((x,))
            return sum(y for (y,) in everyone) / turn.size + 1e-3 * turn.rank, 0 * x
        if self.mistake == "loses":
            total = yield Sum(x / 2)
            return total / turn.size, 0 * x
        if self.mistake == "in place":
            old = turn.state.setdefault("m", torch.zeros_like(x))
            old += x
        total = yield Sum(x / 2)
        return total / turn.size, x / 2


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("", None),
        ("global generator", "global random generator"),
        ("grows", "lost or gained|no contraction"),
        ("biased", "biased"),
        ("own result", "ranks 0 and 1 differ"),
        ("loses", "lost or gained"),
        ("in place", "was changed by a step"),
    ],
)
def test_mistakes_are_found(mistake: str, told: str | None) -> None:
    check: Callable[[], None] = lambda: check_compressor(Wrong(mistake), sizes=(1, 2), draws=50)  # noqa: E731
    if told is None:
        check()
    else:
        with pytest.raises(AssertionError, match=told):
            check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: TopK(0),
        lambda: TopK(True),
        lambda: RandomK(coordinates="mine"),  # type: ignore[arg-type]
        lambda: PowerSGD(0),
        lambda: PowerSGD(2.5),  # type: ignore[arg-type]
        lambda: QSGD(levels=128),
        lambda: QSGD(bucket=100),
    ],
)
def test_settings_are_checked(make: Callable[[], Method]) -> None:
    with pytest.raises(ValueError, match=r"TopK|RandomK|PowerSGD|QSGD"):
        make()
