"""Steps of several methods timed in turns: all of them in every round, so that a machine's moods meet all alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .contender import Contender

#: Of all methods, before any counts: buckets are rebuilt, memory is warm.
WARM_UP = 2
#: Steps of a turn: as many as take about so many seconds, and not more than these.
LONG, MOST = 0.3, 50

Round = dict[str, dict[str, Any]]  # by method


def steps_a_turn(contenders: Mapping[str, Contender]) -> dict[str, int]:
    """Warm all up; then how many steps of each take long enough to be timed. The same on all ranks."""
    taken = {}
    for _ in range(WARM_UP):
        for name, contender in contenders.items():
            taken[name] = contender.turn(1)["step"]
            if contender.size > 1:
                contender.turn(1, exchange=False)
    found = torch.tensor([min(MOST, max(1, round(LONG / seconds))) for seconds in taken.values()])
    if dist.is_initialized():
        found = found.to(next(iter(contenders.values())).device)
        dist.broadcast(found, 0)
    return dict(zip(contenders, found.tolist(), strict=True))


def interleaved(
    contenders: Mapping[str, Contender], count: int, steps: Mapping[str, int], first: int = 0
) -> Iterator[Round]:
    """Rounds, from the one numbered `first`: in each all have their turn, in rotating order, with exchange and without.

    One worker has no exchange, and no "alone".
    """
    for turn in range(first, first + count):
        found: Round = {}
        for name in _order(contenders, turn):
            contender = contenders[name]
            parts = contender.turn(steps[name])
            nbytes, messages = contender.sent()
            found[name] = {
                "seconds": parts.pop("step"),
                "parts": parts,
                "bytes": nbytes,
                "messages": messages,
            }
            if contender.size > 1:
                found[name]["alone"] = contender.turn(steps[name], exchange=False)["step"]
        yield {name: found[name] for name in contenders}


def turns(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each, by rounds, after a warm-up."""
    steps = steps_a_turn(contenders)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in _order(contenders, turn):
            times[name].append(contenders[name].seconds(steps[name]))
    return times


def _order(contenders: Mapping[str, Contender], turn: int) -> list[str]:
    names = list(contenders)
    return names[turn % len(names) :] + names[: turn % len(names)]


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0]), quartiles([2.0])
    ([2.0, 3.0, 4.0], [2.0, 2.0, 2.0])
    """
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3


def ratios(rounds: Sequence[Round], name: str, against: str) -> list[float]:
    """How many times as fast as another a method was, in each round that has both.

    >>> ratios([{"a": {"seconds": 3.0}, "b": {"seconds": 1.5}}, {"a": {"seconds": 1.0}}], "b", "a")
    [2.0]
    """
    return [r[against]["seconds"] / r[name]["seconds"] for r in rounds if name in r and against in r]
