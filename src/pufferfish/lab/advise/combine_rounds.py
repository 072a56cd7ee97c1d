"""`combine_rounds`: estimates of repeated measurements as medians with intervals, and whether the machine is quiet enough."""

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ...measure import SpeedupEstimate

#: Measurements are repeated at least so often, and until the interval of the best method is stable.
MIN_ROUNDS, MAX_ROUNDS = 5, 15
#: Seconds after which measurements are repeated no more, once there are three of them.
MAX_SECONDS = 60.0
#: An interval is stable if it reaches no further than this share from its median to either side.
STABLE = 0.1
#: A machine is busy if the times of the same step differ by more than this share, from quartile to quartile.
BUSY = 0.15


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval for the median of repeated measurements: 95 % from six values on, their range before.

    It is that of the sign test, which assumes nothing about the distribution of the noise.

    >>> median_interval([3.0, 1.0, 2.0]), median_interval(range(1, 13))
    ((1.0, 3.0), (3, 10))
    """
    ordered = sorted(values)
    n = len(ordered)
    outside = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2)) if n >= 6 else 0
    return ordered[outside], ordered[n - 1 - outside]


def combine_rounds(rounds: Sequence[Sequence[SpeedupEstimate]]) -> list[SpeedupEstimate]:
    """The medians over rounds that have the same methods in the same order; `interval` is that of the run's speedup."""
    combined = []
    for estimates in zip(*rounds, strict=True):
        first = estimates[0]
        assert all(e.name == first.name for e in estimates)
        hours = [e.hours for e in estimates if e.hours is not None]
        runs = [e.run_speedup for e in estimates]
        utilisation = [e.utilisation for e in estimates if e.utilisation is not None]
        combined.append(
            replace(
                first,
                step=statistics.median(e.step for e in estimates),
                speedup=statistics.median(e.speedup for e in estimates),
                run_speedup=statistics.median(runs),
                hours=statistics.median(hours) if hours else None,
                interval=median_interval(runs),
                utilisation=statistics.median(utilisation) if utilisation else None,
            )
        )
    return combined


def is_stable(estimate: SpeedupEstimate) -> bool:
    """Whether the interval of an estimate is narrow enough."""
    if estimate.interval is None:
        return True
    low, high = estimate.interval
    return max(estimate.run_speedup - low, high - estimate.run_speedup) <= STABLE * estimate.run_speedup


def busy_reason(seconds: Sequence[float]) -> str:
    """Why the machine seems to be busy, from the times of the same step; "" if it does not."""
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    spread = (high - low) / median
    if spread <= BUSY:
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    hint = f"; load average {load:.1f} on {cores} cores" if load > cores else ""
    return f"the time of the same step varies by {spread:.0%}{hint}"
