"""What the cost model says a step of each method takes, before the rounds that it is held against."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...measure import CostModel, Work, probe
from ...measure.alone import alone
from ...measure.breakdown import PARTS
from ...measure.remedies import message_bytes
from ..advise.job import shared
from ..advise.measured import sending
from ..contender import Contender
from ..network import Shape

_COMPUTING = ("data", "forward", "backward", "optimizer")
_LAPS = 5


def predictions(
    contenders: Mapping[str, Contender], steps: Mapping[str, int], elsewhere: Shape | None = None
) -> dict[str, dict[str, float]]:
    """Seconds of every method's step and its parts, by method. Call it on all ranks, when all is warm.

    Each method's computing is timed without exchange, its compression runs dry, and the link is probed. Nothing is
    fitted to steps with an exchange.

    Args:
        steps: of a turn, by method.
        elsewhere: another link than this one, to predict for.
    """
    works = {name: _work(contender, steps[name]) for name, contender in contenders.items()}
    first = next(iter(contenders.values()))
    link = probe(device=first.device, largest=message_bytes(first.bare))
    if elsewhere is not None:
        link = link.at(bandwidth=1e6 * elsewhere.mbit, latency=1e-3 * elsewhere.delay_ms)
    costs = CostModel(link=link)
    found = {}
    for name, work in works.items():
        said = costs.predict(work)
        found[name] = {"seconds": said.step} | {part: getattr(said, part) for part in (*PARTS, "hidden")}
    return found


def _work(contender: Contender, steps: int) -> Work:
    """What a step computes and sends, nobody waiting for anybody: the mean worker, as slow as the slowest is."""
    assert contender.ddp is not None
    work = alone(
        contender.ddp, lambda: contender.step(exchange=False), contender.optimizer, steps=max(_LAPS, steps)
    )
    parts = shared([getattr(work, name) for name in _COMPUTING])
    (slowest,) = shared(
        [statistics.median(contender.turn(steps, exchange=False)["step"] for _ in range(_LAPS))]
    )
    longer = max(1.0, slowest / sum(parts))
    computing: dict[str, Any] = {name: longer * x for name, x in zip(_COMPUTING, parts, strict=True)}
    buffers = sum(x.nbytes for x in contender.bare.buffers())
    work = replace(work, **computing, buffers=buffers)
    work = sending(work, contender.bare, contender.chosen.compress, contender.size)
    if contender.hook is not None:
        return work
    sizes = tuple(contender.buckets())
    return replace(work, messages=tuple(("all_reduce", n) for n in sizes), handed=sizes)
