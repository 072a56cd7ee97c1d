"""The first methods: property tests, slow references of the papers' equations, and bytes on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import training
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pufferfish.compression import (
    DGC,
    QSGD,
    AlternatingPowerSGD,
    Atomo,
    BFloat16,
    BlockFP8,
    BlockInt8,
    BlockRandomK,
    EFSignSGD,
    Engine,
    Float16,
    Gather,
    Int2,
    Int4,
    LoCo,
    Method,
    NoCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    Settings,
    SignSGD,
    Signum,
    Simulated,
    SparseLoCo,
    StepContext,
    Sum,
    TernGrad,
    Threshold,
    TopK,
)
from pufferfish.compression.check_compressor import check_compressor, gradients

#: Settings that make a difference, beside those of the other tests.
METHODS: list[Any] = [
    *(method for method in training.METHODS.values() if isinstance(method, Method)),
    PowerSGD(rank=4), TopK(), TopK(k=3), TopK(k=1.0), TopK(k=0.1, sample=0.2), RandomK(k=0.1, coordinates="own", scale=True),
    BlockRandomK(k=0.1), BlockRandomK(k=0.1, scale=True), BlockRandomK(k=0.1, coordinates="own", scale=True), DGC(),
    Signum(momentum=0.0), QSGD(levels=127), TernGrad(clip=None), Threshold(tau=1.5), BlockInt8(block=7),
    SparseLoCo(decay=1.0), LoCo(block=8, beta=0.0), LoCo(reset=2),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_properties(method: Method) -> None:
    if isinstance(method, SparseLoCo):
        method = replace(method, decay=1.0)  # a part of its error feedback is meant to be lost
    sizes = (1, 3) if method in training.METHODS.values() else (3,)
    check_compressor(method, sizes=sizes, draws=100 if method.kind == "unbiased" else 20)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([TopK(0.1), PowerSGD(2), OneBitSGD(), EFSignSGD(), BlockInt8(8), BlockFP8(16), Int4(8), Int2(256),
                     SparseLoCo(k=5, chunk=64, decay=1.0), SparseLoCo(k=1, chunk=65536, decay=1.0), SparseLoCo(decay=1.0)]),
    st.lists(st.lists(st.integers(0, 70), max_size=3), min_size=1, max_size=3),
    st.integers(1, 3),
    st.floats(-15, 12),  # gradients whose norm exceeds 1e15 count as not finite
)  # fmt: skip
def test_any_shape_is_a_contraction_that_loses_nothing(
    method: Method, shapes: list[list[int]], workers: int, size: float
) -> None:
    simulated = Simulated(Settings(method, smallest=0), workers)
    stream = torch.Generator().manual_seed(len(shapes))
    given = [
        {str(i): torch.randn(shape, generator=stream) * 10**size for i, shape in enumerate(shapes)}
        for _ in range(workers)
    ]
    means = simulated.average(given)
    states = [engine.state_dict()["own"] for engine in simulated.engines]
    for name, x in given[0].items():
        assert all(torch.equal(mean[name], means[0][name]) for mean in means)
        errors = [own.get(name, {}).get("error", torch.zeros_like(x)) for own in states]
        held = sum(errors) / workers
        if "owner" in states[0].get(name, {}):
            held += torch.cat([own[name]["owner"].flatten() for own in states])[: x.numel()].view(x.shape)
        target = sum(g[name] for g in given) / workers
        torch.testing.assert_close(means[0][name] + held, target, rtol=1e-4, atol=1e-5 * 10**size)
        assert errors[0].norm() <= x.norm() * 1.0001


def weight(size: int, step: int = 0) -> list[dict[str, Tensor]]:
    return [{"w": g["a.weight"]} for g in gradients(size, step)]


def test_power_sgd_equals_the_papers_loop() -> None:
    """One matrix, one worker after the other, in double precision."""
    W, r = 3, 2
    simulated = Simulated(Settings(PowerSGD(r), smallest=0), W)
    errors = [torch.zeros(24, 36, dtype=torch.float64) for _ in range(W)]
    Q = None
    for step in range(4):
        given = weight(W, step)
        applied = simulated.average(given)[0]["w"]
        M = [g["w"].double() + e for g, e in zip(given, errors, strict=True)]
        if Q is None:
            Q = torch.randn(36, r, generator=StepContext(0, W, 0, ("w",)).shared_rng).double()
        P = torch.linalg.qr(sum(m @ Q for m in M) / W).Q
        own = [m.T @ P for m in M]
        Q = sum(own) / W
        errors = [m - P @ q.T for m, q in zip(M, own, strict=True)]
        torch.testing.assert_close(applied.double(), P @ Q.T, rtol=1e-4, atol=1e-5)
        for engine, e in zip(simulated.engines, errors, strict=True):
            torch.testing.assert_close(engine.state.named()["w"]["error"].double(), e, rtol=1e-4, atol=1e-5)


def test_power_sgd_finds_low_rank_gradients_and_forgets_none() -> None:
    """A gradient of rank 2, then zero, then rank 3: directions that were lost come back."""
    engine = Engine(Settings(PowerSGD(3), smallest=0))
    torch.manual_seed(0)
    for rank in (2, 2, 0, 3, 3, 3):
        g = torch.randn(20, rank) @ torch.randn(rank, 30)
        left = g
        for _ in range(3):
            left = left - engine.average({"w": left})["w"]
        assert left.norm() <= 1e-4 * max(1.0, float(g.norm())), rank


def test_top_k_sends_the_largest_and_keeps_the_others() -> None:
    simulated = Simulated(Settings(TopK(k=0.1), smallest=0), 2)
    errors = [torch.zeros(24, 36)] * 2
    for step in range(3):
        given = weight(2, step)
        applied = simulated.average(given)[0]["w"]
        sent = []
        for worker, g in enumerate(given):
            x = g["w"] + errors[worker]
            smallest = x.abs().flatten().sort().values[-math.ceil(0.1 * x.numel())]
            sent.append(torch.where(x.abs() >= smallest, x, 0))
            errors[worker] = x - sent[-1]
        assert torch.equal(applied, (sent[0] + sent[1]) / 2)


@pytest.mark.parametrize("coordinates", ["shared", "own"])
def test_random_k_draws_every_element_equally_often(coordinates: str) -> None:
    simulated = Simulated(Settings(RandomK(0.25, coordinates), smallest=0, error_feedback=False), 2)  # type: ignore[arg-type]
    ones = [{"w": torch.ones(37)}, {"w": torch.ones(37)}]  # one of each of ten runs of 3 or 4
    hits = torch.zeros(37)
    both = 0
    for _ in range(200):
        drawn = simulated.average(ones)[0]["w"]
        assert drawn.sum() == 10  # k of them, at full size, from each
        hits += drawn
        both += int((drawn == 1).sum())
    assert ((hits - 2000 / 37).abs() < 33).all()  # 5 σ
    assert both == 2000 if coordinates == "shared" else 390 < both < 690  # a chance of (10/37)² for each


@pytest.mark.parametrize("s", [2, 5, 12, 25, 50, 100])  # in 3 to 8 bits
def test_qsgd_gives_levels_of_its_norms(s: int) -> None:
    x = gradients(1)[0]["a.weight"].flatten()[:64]
    engine = Engine(Settings(QSGD(levels=s, bucket=64), smallest=0))
    norms = []
    for _ in range(20):
        q = engine.average({"w": x})["w"]
        nonzero = q[q != 0]
        unit = nonzero.abs().min()
        levels = nonzero / unit
        torch.testing.assert_close(levels, levels.round(), rtol=1e-4, atol=1e-4)
        assert levels.abs().max() <= s
        norms.append(unit)
    assert len({round(float(n), 3) for n in norms}) > 1  # the second rounding has the first one's norm


def sent_bytes(method: Method, W: int) -> dict[str, int]:
    """Bytes for one tensor of 4096 elements, without the two flags of the agreement."""
    simulated = Simulated(Settings(method), W)
    simulated.average([{"w": torch.randn(64, 64)} for _ in range(W)])
    found = simulated.meter.collective_bytes
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
        (BlockInt8(), (0, 4096 // 4 + 4 * 4, 4096 + 4 * 16)),
        (BlockFP8(), (0, 4096 // 4 + 4 * 4, 4096 + 4 * 16)),
        (Int4(), (0, 4096 // 2 // 4 + 4 * 4, 4096 // 2 + 4 * 16)),
        (Int2(), (0, 4096 // 4 // 4 + 4 * 4, 4096 // 4 + 4 * 16)),
    ],
    ids=repr,
)
def test_size_on_the_wire(method: Method, expected: tuple[int, int, int]) -> None:
    found = sent_bytes(method, 4)
    assert (found["all_reduce"], found["all_gather"], found["all_to_all"]) == expected


@dataclass(frozen=True)
class Wrong(Method):
    """A method with one mistake."""

    mistake: str = ""

    @property
    def kind(self) -> str:
        return "unbiased" if self.mistake == "biased" else "contraction"

    def compress(self, x, ctx):  # type: ignore[no-untyped-def]
        if self.mistake == "global generator":
            torch.rand(1)
        if self.mistake == "grows":
            total = yield Sum(-x)
            return total / ctx.size, 2 * x
        if self.mistake == "biased":
            total = yield Sum(0.9 * x * torch.empty_like(x).uniform_(0.5, 1.5, generator=ctx.own_rng))
            return total / ctx.size, None
        if self.mistake == "own result":
            everyone = yield Gather((x,))
            return sum(y for (y,) in everyone) / ctx.size + 1e-3 * ctx.worker, 0 * x
        if self.mistake == "loses":
            total = yield Sum(x / 2)
            return total / ctx.size, 0 * x
        if self.mistake == "in place":
            old = ctx.state.setdefault("m", torch.zeros_like(x))
            old += x
        total = yield Sum(x / 2)
        return total / ctx.size, x / 2


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("", None),
        ("global generator", "global random generator"),
        ("grows", "lost or gained|not a contraction"),
        ("biased", "biased"),
        ("own result", "workers 0 and 1 differ"),
        ("loses", "lost or gained"),
        ("in place", "was changed by a step"),
    ],
)
def test_mistakes_are_found(mistake: str, message: str | None) -> None:
    check: Callable[[], None] = lambda: check_compressor(Wrong(mistake), sizes=(1, 2), draws=50)  # noqa: E731
    if message is None:
        check()
    else:
        with pytest.raises(AssertionError, match=message):
            check()


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (TopK, "k", (0.0, 1.5, 0, True)), (TopK, "sample", (0.0, 1.5)), (RandomK, "coordinates", ("mine",)),
        (BlockRandomK, "k", (0,)), (PowerSGD, "rank", (0, 2.5)), (AlternatingPowerSGD, "rank", (-1,)), (Atomo, "rank", (0,)),
        (QSGD, "levels", (128,)), (QSGD, "bucket", (100,)), (TernGrad, "clip", (0.0, math.nan)), (BlockFP8, "block", (0, 2.5)),
        (Int4, "block", (0, 12, 8.0)), (Int2, "block", (4,)), (LoCo, "beta", (1.0, -0.1)), (LoCo, "reset", (0, 2.5)),
        (DGC, "sparsity", (1.0,)), (DGC, "momentum", (-0.1,)), (DGC, "warm_up", (-1, 1.5)), (Signum, "momentum", (1.0,)),
        (Threshold, "tau", (0.0, math.inf)), (SparseLoCo, "k", (0, 5000)), (SparseLoCo, "chunk", (2**16 + 1,)),
        (SparseLoCo, "decay", (0.0, 1.1)),
    ],
)  # fmt: skip
def test_settings_are_checked(kind: type[Method], name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{kind.__name__}: {name}="):
            kind(**{name: value})
