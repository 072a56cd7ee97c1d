"""Time on a device, and helpers for noisy timings."""

import time
from collections.abc import Iterable

import torch

#: Seconds, or an event on a GPU's stream.
Timestamp = float | torch.cuda.Event


def timestamp(device: torch.device) -> Timestamp:
    """Record the current time on `device`; on a GPU, an event on its current stream.

    >>> cpu = torch.device("cpu")
    >>> elapsed(timestamp(cpu), timestamp(cpu)) >= 0
    True
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def reached(stamp: Timestamp) -> bool:
    """Whether the device has reached `stamp`; does not wait."""
    return isinstance(stamp, float) or bool(stamp.query())


def elapsed(start: Timestamp, end: Timestamp) -> float:
    """Seconds from `start` to `end`; waits until the device has reached `end`."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def pause() -> None:
    """Sleep for 5 ms, as a worker waits for the others in a real step, so that caches are as cold as in training."""
    time.sleep(0.005)


def trimmed_mean(seconds: Iterable[float]) -> float:
    """Mean without the longest tenth (at least one), to exclude timings disturbed by other processes.

    Not the median: a short message takes 0.5 ms, or 4 ms if its process has lost its core, and both are common.

    >>> trimmed_mean([1.0, 1.0, 4.0, 100.0])
    2.0
    """
    ordered = sorted(seconds)
    kept = ordered[: len(ordered) - -(-len(ordered) // 10)] if len(ordered) > 2 else ordered
    return sum(kept) / len(kept)
