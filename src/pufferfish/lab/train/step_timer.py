"""`StepTimer`: seconds per training step."""

import statistics
from itertools import pairwise

import torch

from ...measure.breakdown import Timestamp, elapsed, reached, timestamp


class StepTimer:
    """Measures the time from the end of one step to the end of the next, without synchronizing the device at each step.

    >>> timer = StepTimer(torch.device("cpu"))
    >>> timer.tick(), timer.tick(), timer.pause()
    (None, None, None)
    >>> timer.median() >= 0
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timestamps: list[Timestamp] = []
        self._seconds: list[float] = []

    def tick(self) -> None:
        """Mark the end of a step, or the start of the first one."""
        self._timestamps.append(timestamp(self.device))

    def pause(self) -> None:
        """Exclude the time until the next `tick`. Synchronizes the device."""
        self._seconds += [elapsed(a, b) for a, b in pairwise(self._timestamps)]
        self._timestamps = []

    def reset(self) -> None:
        """Discard all steps so far."""
        self._timestamps, self._seconds = [], []

    def recent(self) -> float | None:
        """Return the mean seconds of the last 50 steps that have finished; does not synchronize the device."""
        done = [m for m in self._timestamps[-50:] if reached(m)]
        if len(done) > 1:
            return elapsed(done[0], done[-1]) / (len(done) - 1)
        return statistics.mean(self._seconds[-50:]) if self._seconds else None

    def total(self) -> float:
        """Return the seconds of all steps."""
        return sum(self._seconds)

    def mean(self) -> float | None:
        """Return the mean seconds per step; None without steps."""
        return statistics.mean(self._seconds) if self._seconds else None

    def median(self) -> float | None:
        """Return the median seconds per step; None without steps."""
        return statistics.median(self._seconds) if self._seconds else None
