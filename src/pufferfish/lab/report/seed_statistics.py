"""Means with 95 % confidence intervals, and differences and ratios paired by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom.
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A mean, half the width of its 95 % interval (None for a single value), and the number of values."""

    mean: float
    half: float | None
    count: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0.

        >>> estimate([0.4, 0.5, 0.6]).significant, estimate([-0.4, 0.5, 0.6]).significant, estimate([0.5]).significant
        (True, False, False)
        """
        return self.half is not None and abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of the values with its interval; None without values.

    >>> estimate([93.0, 93.5, 94.0])
    Estimate(mean=93.5, half=1.242..., count=3)
    """
    if not values:
        return None
    n = len(values)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Estimate(statistics.fmean(values), half, n)


def t_quantile(freedom: int) -> float:
    """Half-width of the central 95 % of Student's t distribution, in standard errors.

    >>> t_quantile(2), round(t_quantile(60), 3)
    (4.3027, 2.0)
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL  # an expansion in 1 / freedom, accurate to four digits beyond the table
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def paired_differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """`ours - theirs` for every seed that both have.

    >>> paired_differences({0: 3.0, 1: 5.0}, {1: 4.0, 2: 9.0})
    [1.0]
    """
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def paired_speedup(theirs: Mapping[int, float], ours: Mapping[int, float]) -> float | None:
    """Median of `theirs / ours` over the seeds that both have: for seconds, the speedup.

    >>> paired_speedup({0: 6.0, 1: 6.2}, {0: 3.0, 1: 2.0, 2: 9.0})
    2.55
    """
    ratios = [theirs[seed] / ours[seed] for seed in ours.keys() & theirs.keys() if ours[seed]]
    return statistics.median(ratios) if ratios else None
