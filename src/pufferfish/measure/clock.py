"""Helpers for noisy timings."""

import time
from collections.abc import Iterable


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
