"""`LocalExchange`: bytes of local steps, and predicted waits against a slow simulation and by hand."""

from __future__ import annotations

import pytest
import torch

from pufferfish.compression import BFloat16, NoCompression, SparseLoCo
from pufferfish.local.schedule import Schedule
from pufferfish.measure import CostModel, Link, Work
from pufferfish.measure.cost_model import LocalExchange, Traffic, wire_bytes, with_local_exchange

LIKE = {f"blocks.{i}.weight": torch.empty(64, 64) for i in range(4)}
COMPUTE = Work(forward=0.01, backward=0.02, optimizer=0.01)


def slow_wait(schedule: Schedule, compute: float, seconds: list[float], tick: float = 1e-3) -> float:
    """Wait of the fourth round: a clock that ticks, a queue of exchanges, and updates that need what has landed."""
    updates, left, waited = 0, compute, 0.0
    queue: list[list[float]] = []  # update at which it is applied, and seconds left
    while True:
        if queue:
            queue[0][1] -= tick
            if queue[0][1] < tick / 2:
                queue.pop(0)
        if any(land <= updates for land, _ in queue):
            waited += tick if updates > 3 * schedule.h else 0.0
            continue
        if updates == 4 * schedule.h:
            return waited
        left -= tick
        if left < tick / 2:
            updates, left = updates + 1, compute
            queue += [[updates + schedule.delay, seconds[p]] for p in schedule.due(updates % schedule.h)]


@pytest.mark.parametrize(
    ("h", "delay", "seconds"),
    [
        (6, 1, [0.1, 0.3, 0.02]),
        (6, 4, [0.1, 0.3, 0.02]),
        (6, 2, [0.5, 0.5, 0.5]),  # the link is too slow: exchanges queue
        (5, 1, [0.04]),
    ],
)
def test_waits_equal_a_simulation(h: int, delay: int, seconds: list[float]) -> None:
    schedule = Schedule(h=h, fragments=len(seconds), delay=delay)
    exchange = LocalExchange(schedule, (Traffic(messages=()),) * len(seconds))
    assert exchange.waiting(0.1, seconds) == pytest.approx(slow_wait(schedule, 0.1, seconds), abs=0.02)


def test_plain_local_steps_by_hand() -> None:
    """All workers wait for the whole exchange, once in h steps."""
    link = Link.nominal(bandwidth=1e7, latency=0, size=4, goodput=1)
    work = with_local_exchange(COMPUTE, Schedule(h=10), NoCompression(), LIKE, 4)
    nbytes = 4 * 4 * 64 * 64
    exchange = 1.5 * nbytes * 8 / 1e7
    predicted = CostModel(link=link).predict(work)
    assert predicted.exchange == pytest.approx(
        exchange / 10, rel=1e-3
    )  # with a flag for values that are not finite
    assert predicted.hidden == 0
    assert predicted.step == pytest.approx(0.04 + exchange / 10, rel=0.1)  # with the time of a dry run
    assert predicted.utilisation == pytest.approx(0.04 / predicted.step)
    assert wire_bytes(work, 4) == pytest.approx(1.5 * nbytes / 10, rel=1e-3)


def test_streaming_hides_what_the_delay_allows() -> None:
    nbytes = 4 * 4 * 64 * 64
    one = 1.5 * nbytes / 4 * 8  # bits of a fragment
    for bandwidth, waits in ((one / 0.1, False), (one / 0.5, True)):  # 3 steps take 0.12 s
        link = Link.nominal(bandwidth=bandwidth, latency=0, size=4, goodput=1)
        work = with_local_exchange(COMPUTE, Schedule(h=12, fragments=4, delay=3), NoCompression(), LIKE, 4)
        predicted = CostModel(link=link).predict(work)
        assert (predicted.exchange > 0) == waits
        assert (predicted.utilisation == 1.0) == (not waits)
        assert predicted.exchange + predicted.hidden >= 4 * 8 * 1.5 * nbytes / 4 / bandwidth / 12 * 0.999
    assert work.local is not None
    assert work.local.peak_bytes(4) == pytest.approx(1.5 * nbytes / 4, rel=1e-3)
    assert work.local.wire_bytes(4) == pytest.approx(1.5 * nbytes / 12, rel=1e-3)


def test_compressed_averages_are_those_of_the_method() -> None:
    schedule = Schedule(h=30)
    sizes = [
        wire_bytes(with_local_exchange(COMPUTE, schedule, m, LIKE, 4), 4)
        for m in (NoCompression(), BFloat16(), SparseLoCo())
    ]
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=1e-3)
    assert sizes[0] / sizes[2] == pytest.approx(
        142 / 2, rel=0.05
    )  # gathered by 4: twice an all-reduce's share
