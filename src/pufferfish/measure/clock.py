"""Moments that can be subtracted later, of the host or on a GPU of its stream, without waiting for it; and laps."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """This moment, on the device.

    >>> cpu = torch.device("cpu")
    >>> between(now(cpu), now(cpu)) >= 0
    True
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def passed(moment: Moment) -> bool:
    """Whether the device has come so far."""
    return isinstance(moment, float) or bool(moment.query())


def between(start: Moment, end: Moment) -> float:
    """Seconds; waits until the device has come so far."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def wait() -> None:
    """As a worker waits for the others in every step: what is cold after it would else be timed warm."""
    time.sleep(0.005)


def typical(laps: Iterable[float]) -> float:
    """The mean without the longest tenth, one at least, which something else on the machine has disturbed.

    Not the median: a short message takes half a millisecond or, when its process has lost its core, four.

    >>> typical([1.0, 1.0, 4.0, 100.0])
    2.0
    """
    found = sorted(laps)
    kept = found[: len(found) - -(-len(found) // 10)] if len(found) > 2 else found
    return sum(kept) / len(kept)
