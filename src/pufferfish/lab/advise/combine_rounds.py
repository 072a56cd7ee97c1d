"""`combine_rounds`: estimates of repeated measurements as medians with intervals, and whether the machine is quiet enough."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
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
    """The medians over rounds that have the same methods in the same order; `interval` is that of the run's speedup.

    Times follow from the medians of the first method's times and of the speedups, which are paired by round. A median of a
    method's own times could contradict its speedup on a busy machine.

    >>> def estimate(name, step, speedup):
    ...     return SpeedupEstimate(
    ...         kind="", name=name, step=step, speedup=speedup, run_speedup=speedup, hours=step, wire_bytes=0
    ...     )
    >>> fast = [("a", 2.0, 1.0), ("b", 1.0, 2.0)]
    >>> busy = [("a", 8.0, 1.0), ("b", 4.0, 2.0)]
    >>> odd = [("a", 2.0, 1.0), ("b", 4.0, 0.5)]
    >>> [(e.step, e.speedup, e.hours) for e in combine_rounds([[estimate(*x) for x in r] for r in (fast, busy, odd)])]
    [(2.0, 1.0, 2.0), (1.0, 2.0, 1.0)]
    """
    step = statistics.median(estimates[0].step for estimates in rounds)
    hours = [estimates[0].hours for estimates in rounds if estimates[0].hours is not None]
    combined = []
    for estimates in zip(*rounds, strict=True):
        first = estimates[0]
        assert all(e.name == first.name for e in estimates)
        runs = [e.run_speedup for e in estimates]
        speedup, run_speedup = statistics.median(e.speedup for e in estimates), statistics.median(runs)
        utilisation = [e.utilisation for e in estimates if e.utilisation is not None]
        combined.append(
            replace(
                first,
                step=step / speedup,
                speedup=speedup,
                run_speedup=run_speedup,
                hours=statistics.median(hours) / run_speedup if hours else None,
                interval=median_interval(runs),
                utilisation=statistics.median(utilisation) if utilisation else None,
            )
        )
    return combined


def combine_seconds(
    seconds: Sequence[Mapping[float, float]], rounds: Sequence[Sequence[SpeedupEstimate]]
) -> dict[float, float]:
    """The medians of further step times of the same rounds, as shares of the first method's step, as in `combine_rounds`."""
    step = statistics.median(estimates[0].step for estimates in rounds)
    return {
        key: step * statistics.median(s[key] / e[0].step for s, e in zip(seconds, rounds, strict=True))
        for key in seconds[0]
    }


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
