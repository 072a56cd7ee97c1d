"""What a run took: seconds a step, and memory."""

from __future__ import annotations

import contextlib
import statistics
from itertools import pairwise
from pathlib import Path

import torch

from ...measure.clock import Moment, between, now, passed


class Pace:
    """The steps' times, from the end of one to the end of the next; nothing waits for the device until it is asked.

    >>> pace = Pace(torch.device("cpu"))
    >>> pace.tick(), pace.tick(), pace.pause()
    (None, None, None)
    >>> pace.median() >= 0
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moments: list[Moment] = []
        self._seconds: list[float] = []

    def tick(self) -> None:
        """A step has ended, or the first begins."""
        self._moments.append(now(self.device))

    def pause(self) -> None:
        """What comes now is no step. Waits for the device."""
        self._seconds += [between(a, b) for a, b in pairwise(self._moments)]
        self._moments = []

    def restart(self) -> None:
        """Steps are of another kind from now on."""
        self._moments, self._seconds = [], []

    def recent(self) -> float | None:
        """About the same, of the last steps, without waiting for those under way."""
        done = [m for m in self._moments[-50:] if passed(m)]
        if len(done) > 1:
            return between(done[0], done[-1]) / (len(done) - 1)
        return statistics.mean(self._seconds[-50:]) if self._seconds else None

    def median(self) -> float | None:
        """Seconds a step; None if there was none."""
        return statistics.median(self._seconds) if self._seconds else None


def forget_peak(device: torch.device) -> None:
    """Watch memory from here on, where the system lets us."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int | None:
    """The most bytes that were in use: on a GPU by tensors, else by this process. None where nobody knows.

    >>> peak(torch.device("cpu")) is None or peak(torch.device("cpu")) > 10**6
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
