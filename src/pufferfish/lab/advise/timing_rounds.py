"""`timing_rounds`: interleaved timing of several models, so that machine noise affects all methods equally."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .timed_model import TimedModel

#: Steps of each model before the timing: DDP rebuilds its buckets, caches fill.
WARM_UP_STEPS = 2
#: The steps of a model in a round take about this many seconds, but are not more than this many. Local steps: whole rounds.
ROUND_SECONDS, MAX_STEPS = 0.3, 50

Round = dict[str, dict[str, Any]]  # by method


def steps_per_round(models: Mapping[str, TimedModel]) -> dict[str, int]:
    """Warm up all models and return how many steps of each are timed in a round; the same on all workers."""
    seconds = {}
    for _ in range(WARM_UP_STEPS):
        for name, model in models.items():
            seconds[name] = model.time_parts(1)["step"]
            if model.size > 1:
                model.time_parts(1, exchange=False)
    counts = {name: min(MAX_STEPS, max(1, round(ROUND_SECONDS / s))) for name, s in seconds.items()}
    steps = torch.tensor(
        [math.ceil(n / models[name].period) * models[name].period for name, n in counts.items()]
    )
    if dist.is_initialized():
        steps = steps.to(next(iter(models.values())).device)
        dist.broadcast(steps, 0)
    return dict(zip(models, steps.tolist(), strict=True))


def timing_rounds(
    models: Mapping[str, TimedModel], count: int, steps: Mapping[str, int], first: int = 0
) -> Iterator[Round]:
    """Time all models in each round, in rotating order, with and without the exchange.

    Args:
        steps: steps of each model in a round, from `steps_per_round`.
        first: number of the first round, which determines the order.

    Yields:
        By method: "seconds" of a step, its "parts", "bytes" and "messages", and for several workers
        "compute_seconds", a step without the exchange.
    """
    for number in range(first, first + count):
        timings: Round = {}
        for name in _order(models, number):
            model = models[name]
            parts = model.time_parts(steps[name])
            timing = timings[name] = {"seconds": parts.pop("step"), "parts": parts}
            timing["bytes"], timing["messages"] = model.traffic()
            if model.size > 1:
                timing["compute_seconds"] = model.time_parts(steps[name], exchange=False)["step"]
        yield {name: timings[name] for name in models}


def step_times(models: Mapping[str, TimedModel], steps: Mapping[str, int], number: int) -> dict[str, float]:
    """Seconds of a step of each model in one round.

    Args:
        steps: steps of each model in the round, from `steps_per_round`.
        number: of the round, which determines the order.
    """
    times = {name: models[name].seconds(steps[name]) for name in _order(models, number)}
    return {name: times[name] for name in models}


def _order(models: Mapping[str, TimedModel], number: int) -> list[str]:
    names = list(models)
    return names[number % len(names) :] + names[: number % len(names)]


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0]), quartiles([2.0])
    ([2.0, 3.0, 4.0], [2.0, 2.0, 2.0])
    """
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3


def speedups(rounds: Sequence[Round], name: str, against: str) -> list[float]:
    """Speedup of a method over another, in each round that has both.

    >>> speedups([{"a": {"seconds": 3.0}, "b": {"seconds": 1.5}}, {"a": {"seconds": 1.0}}], "b", "a")
    [2.0]
    """
    return [r[against]["seconds"] / r[name]["seconds"] for r in rounds if name in r and against in r]
