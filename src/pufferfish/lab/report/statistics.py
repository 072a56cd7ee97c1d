"""Means with 95 % intervals, and differences and ratios that are paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom.
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A mean, half the width of its 95 % interval (None with one value only), and of how many values."""

    mean: float
    half: float | None
    count: int

    @property
    def settled(self) -> bool:
        """Whether the interval leaves 0 out.

        >>> estimate([0.4, 0.5, 0.6]).settled, estimate([-0.4, 0.5, 0.6]).settled, estimate([0.5]).settled
        (True, False, False)
        """
        return self.half is not None and abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate | None:
    """Of at least one value; None without any.

    >>> estimate([93.0, 93.5, 94.0])
    Estimate(mean=93.5, half=1.242..., count=3)
    """
    if not values:
        return None
    n = len(values)
    half = student(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Estimate(statistics.fmean(values), half, n)


def student(freedom: int) -> float:
    """So many standard errors to each side of the mean hold 95 %.

    >>> student(2), round(student(60), 3)
    (4.3027, 2.0)
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL  # an expansion in 1 / freedom; beyond the table it is right to four digits
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Ours less theirs, for every seed that both have.

    >>> differences({0: 3.0, 1: 5.0}, {1: 4.0, 2: 9.0})
    [1.0]
    """
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def ratio(theirs: Mapping[int, float], ours: Mapping[int, float]) -> float | None:
    """The median of theirs / ours over the seeds that both have: how many times as fast, given seconds.

    >>> ratio({0: 6.0, 1: 6.2}, {0: 3.0, 1: 2.0, 2: 9.0})
    2.55
    """
    found = [theirs[seed] / ours[seed] for seed in ours.keys() & theirs.keys() if ours[seed]]
    return statistics.median(found) if found else None
