"""The cost model against hand-computed numbers and against data with known α, β and contention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pufferfish.compression import AlternatingPowerSGD, BFloat16, NoCompression, PowerSGD, TopK
from pufferfish.measure import AlphaBeta, CostModel, Link, Work, cost_model, dry_run
from pufferfish.measure.cost_model import ddp_bucket_bytes
from pufferfish.measure.link import COLLECTIVES, wire_factor

SIZES = [2**k for k in range(10, 26, 3)]


@given(st.sampled_from(COLLECTIVES), st.integers(2, 16), st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_fit_recovers_alpha_and_beta(kind: str, size: int, alpha: float, beta: float) -> None:
    true = AlphaBeta(alpha=alpha, beta=beta)
    found = AlphaBeta.fit(kind, size, [(b, true.seconds(kind, b, size)) for b in SIZES])
    assert (found.alpha, found.beta) == (pytest.approx(alpha, rel=1e-4), pytest.approx(beta, rel=1e-4))


def test_fit_is_never_negative() -> None:
    falling = [(1024, 1e-3), (2**20, 5e-4)]
    assert AlphaBeta.fit("all_reduce", 2, falling).beta == 0
    steep = [(1024, 1e-9), (2**20, 1e-2)]
    assert AlphaBeta.fit("all_reduce", 2, steep).alpha == 0


def test_one_outlier_does_not_affect_other_sizes() -> None:
    times = [(1024, 1e-3), (4096, 9e-3), (16384, 2e-3), (65536, 5e-3)]
    line = AlphaBeta.fit("all_reduce", 2, times)
    assert line.points == ((1024, 1e-3), (4096, 2e-3), (16384, 2e-3), (65536, 5e-3))


def test_ring_collectives_by_hand() -> None:
    """Ring all-reduce: 2α(p−1) + 2b(p−1)/(p·BW)."""
    link = Link.nominal(bandwidth=1e9, latency=1e-3, size=4, goodput=1)
    assert link.seconds("all_reduce", 10**8) == pytest.approx(6e-3 + 2 * 1e8 * 0.75 / 1.25e8)
    assert link.seconds("all_gather", 10**6) == pytest.approx(3e-3 + 3e6 / 1.25e8)
    assert link.seconds("all_to_all", 10**6) == pytest.approx(3e-3 + 0.75e6 / 1.25e8)
    assert link.seconds("all_reduce", 10**8, size=1) == 0
    assert link.extrapolated
    with pytest.raises(ValueError, match="above 0"):
        Link.nominal(bandwidth=0, latency=0, size=2)


def test_the_slower_of_software_and_line_counts() -> None:
    here = Link(size=2, collectives={"all_reduce": AlphaBeta(alpha=1e-4, beta=1e-8)})
    assert here.limited_to(bandwidth=1e12).collectives == here.collectives
    assert here.limited_to(bandwidth=1e8).bandwidth == pytest.approx(0.949e8)
    assert not here.extrapolated
    assert here.limited_to(bandwidth=1e12).extrapolated


def slow_step_with_contention(work: Work, link: Link, contention: float, tick: float = 2e-6) -> float:
    """Reference: small ticks; messages queue for the link, and computation is slower while one is sent."""
    waiting = list(work.messages)
    total, gone, done, clock, busy_until, pace = sum(n for _, n in waiting), 0, 0.0, 0.0, 0.0, 1.0
    while done < work.backward or waiting:
        if clock >= busy_until:
            pace = 1.0
            if waiting and done / work.backward + 1e-9 >= (gone + waiting[0][1]) / total:
                kind, n = waiting.pop(0)
                gone += n
                busy_until = clock + link.seconds(kind, n)
                pace = 1 - contention * wire_factor(kind, link.size) * n / link.seconds(kind, n)
        clock += tick
        done = min(work.backward, done + pace * tick)
    return work.forward + max(clock, busy_until)


@pytest.mark.parametrize("contention", [0.0, 1e-9, 4e-9])
@pytest.mark.parametrize("pieces", [1, 3, 7])
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e11])
def test_overlap_equals_a_simulation(contention: float, pieces: int, bandwidth: float) -> None:
    contention *= 1e9 / bandwidth
    link = Link.nominal(bandwidth=bandwidth, latency=1e-4, size=4)
    messages = tuple(("all_reduce", 10**6 * (1 + i % 3)) for i in range(pieces))
    work = Work(forward=0.01, backward=0.05, messages=messages, overlaps=True)
    costs = CostModel(link=dataclasses.replace(link, contention=contention))
    predicted = costs.predict(work)
    assert predicted.step == pytest.approx(slow_step_with_contention(work, link, contention), rel=1e-2)
    seen = dataclasses.replace(work, backward=predicted.backward)
    assert predicted.exchange + predicted.hidden == pytest.approx(
        sum(link.seconds(kind, n) for kind, n in messages), rel=1e-2
    )
    assert costs.without_contention(seen).backward == pytest.approx(0.05, rel=1e-6)


def test_a_message_waits_for_its_bucket() -> None:
    link = Link.nominal(bandwidth=1e9, latency=0, size=2, goodput=1)
    pieces = (("all_reduce", 4 * 10**6), ("all_reduce", 6 * 10**6))  # 32 and 48 ms
    work = Work(forward=0.0, backward=0.1, messages=pieces, overlaps=True)
    assert CostModel(link=link).predict(work).step == pytest.approx(0.1 + 0.048)
    late = dataclasses.replace(
        work, bucket_bytes=(10**6, 10**6 * 8, 10**6)
    )  # the first piece is complete with the second
    assert CostModel(link=link).predict(late).step == pytest.approx(0.09 + 0.032 + 0.048)


def test_buffers_come_before_forward() -> None:
    link = Link.nominal(bandwidth=1e9, latency=1e-3, size=4, goodput=1)
    work = Work(forward=0.1, backward=0.1, buffer_bytes=10**6)
    assert CostModel(link=link).predict(work).step == pytest.approx(0.2 + 2 * (1e-3 + 8e-3))


def test_interpolation_for_the_measured_number_of_workers() -> None:
    times = [(1000, 1e-4), (10_000, 1e-4), (100_000, 5e-2)]  # a line that lets small messages through
    line = AlphaBeta.fit("all_reduce", 2, times)
    link = Link(size=2, collectives={"all_reduce": line})
    assert link.seconds("all_reduce", 5000) == pytest.approx(1e-4)
    assert link.seconds("all_reduce", 55_000) == pytest.approx((1e-4 + 5e-2) / 2)
    assert link.seconds("all_reduce", 10**6) == line.seconds("all_reduce", 10**6, 2)
    assert link.seconds("all_reduce", 5000, size=4) == line.seconds("all_reduce", 5000, 4)
    assert not link.limited_to(bandwidth=1e9).collectives["all_reduce"].points


def test_without_overlap_parts_add_up() -> None:
    link = Link.nominal(bandwidth=1e9, latency=1e-3, size=4)
    messages = (("all_to_all", 10**6), ("all_gather", 10**5))
    work = Work(forward=1, backward=2, optimizer=3, data=4, encode=5, decode=6, messages=messages)
    predicted = CostModel(link=dataclasses.replace(link, contention=1.0)).predict(work)
    assert predicted.exchange == pytest.approx(sum(link.seconds(*m) for m in messages))
    assert predicted.step == pytest.approx(21 + predicted.exchange)
    assert predicted.hidden == 0


def test_hierarchy_by_hand() -> None:
    lines = {"all_reduce": AlphaBeta(alpha=1e-3, beta=1e-8)}
    link = Link(
        size=8, per_node=4, collectives=lines,
        intra_node={"all_reduce": AlphaBeta(alpha=1e-5, beta=1e-10)}, inter_node={"all_reduce": AlphaBeta(alpha=1e-3, beta=4e-8)},
    )  # fmt: skip
    work = Work(forward=0.0, backward=0.0, messages=(("all_reduce", 10**6),), intra_node_bytes=4 * 10**6)
    inside = (6 * 1e-5 + 6e6 * 1e-10) + (2 * 1e-5 + 8e6 * 1e-10)  # all-reduce, broadcast
    assert CostModel(link=link).predict(work).step == pytest.approx(inside + 2e-3 + 1e6 * 4e-8)
    assert CostModel(link=link).predict(work, workers=16).step == pytest.approx(inside + 6e-3 + 1.5e6 * 4e-8)
    slow = link.limited_to(bandwidth=1e8)
    assert slow.intra_node == link.intra_node
    assert slow.inter_node is not None
    assert slow.inter_node["all_reduce"].beta == slow.collectives["all_reduce"].beta


def test_buckets_equal_ddp() -> None:
    """Same assignment as torch."""
    sizes = [4 * n for n in (300_000, 10, 2_000_000, 64, 7_000_000, 1_000, 500_000, 3)]
    tensors = [torch.empty(n // 4, device="meta") for n in sizes]
    caps = [2**20, 25 * 2**20]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors))
    theirs = [sum(sizes[i] for i in bucket) for bucket in indices]
    assert ddp_bucket_bytes(sizes) == theirs
    assert sum(ddp_bucket_bytes(sizes)) == sum(sizes)


def test_messages_do_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that change from step to step: workers that run more steps must still report the same ones."""
    like = {"w": torch.empty(256, 64)}
    found = set()
    for most in (6, 7):
        monkeypatch.setattr(cost_model, "_MAX_STEPS", most)
        found.add(dry_run(AlternatingPowerSGD(4), like, 8).messages)
    assert len(found) == 1
    assert dry_run(AlternatingPowerSGD(4), like, 8, steps=2).messages not in found


def test_dry_run_messages() -> None:
    like = dict(nn.Linear(128, 64).named_parameters())
    plain = 4 * (128 * 64 + 64)
    state = torch.get_rng_state()
    for method, most, kind in (
        (NoCompression(), plain + 16, "all_reduce"),
        (BFloat16(), plain / 2 + 16, "all_reduce"),
        (PowerSGD(rank=2), 4 * (2 * (128 + 64) + 64) + 16, "all_reduce"),
        (TopK(0.01), plain / 20, "all_gather"),
    ):
        sent = dry_run(method, like, 8, steps=1)
        assert 0 < sum(nbytes for _, nbytes in sent.messages) <= most, method
        assert kind in {kind for kind, _ in sent.messages}
        assert sent.encode > 0
        assert sent.decode > 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in like.values())
    meta = {name: p.detach().to("meta") for name, p in like.items()}
    assert (
        dry_run(PowerSGD(rank=2), meta, 8, device="cpu").messages
        == dry_run(PowerSGD(rank=2), like, 8).messages
    )
    later = dry_run(PowerSGD(rank=2, start=50), like, 8, steps=1)  # what it sends from then on
    assert later.messages == dry_run(PowerSGD(rank=2), like, 8, steps=1).messages
