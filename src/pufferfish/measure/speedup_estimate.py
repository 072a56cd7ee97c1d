"""`SpeedupEstimate`: how much shorter a training option makes a step and a run; `estimate` predicts it."""

from dataclasses import dataclass

from .cost_model import CostModel, Work
from .link import WIRE_FACTOR
from .option_builder import TrainingOption

WARM_UP_FRACTION = 1 / 3  # fraction of a run trained full-rank before the switch
MIN_SPEEDUP = 1.05  # options whose run is not faster by this factor are not recommended


@dataclass(frozen=True, kw_only=True)
class SpeedupEstimate:
    """Step time and speed-ups of a training option: predicted, or measured if `measured` is set."""

    kind: str
    name: str
    step: float  # predicted seconds, per current number of batches in a step
    speedup: float  # of a step
    run_speedup: float  # of the whole run, including warm-up
    hours: float | None  # of the whole run, if its number of steps is known
    wire_bytes: float  # sent by a worker in a step
    note: str = ""
    measured: float | None = None  # seconds of a step, if the option was run
    interval: tuple[float, float] | None = None  # of `run_speedup`, if the measurement was repeated
    utilisation: float | None = None  # predicted computing time over the time of a step


def estimate(
    option: TrainingOption,
    current: Work,
    costs: CostModel,
    size: int,
    *,
    waiting: float = 0.0,
    warm_up: float = WARM_UP_FRACTION,
    hours: float | None = None,
) -> SpeedupEstimate:
    """Predict step time, speed-ups and bytes of `option`.

    Args:
        current: the current step, which the speed-ups are over.
        size: number of workers.
        waiting: seconds of a step spent waiting for the slowest worker.
        warm_up: fraction of the run, for options with a warm-up.
        hours: of the whole run at the current speed.

    >>> from pufferfish.measure import Link
    >>> current = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),))
    >>> half = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 5 * 10**6),))
    >>> costs = CostModel(link=Link.nominal(bandwidth=1e9, latency=0, size=2, goodput=1))
    >>> round(estimate(TrainingOption(kind="free", name="half", work=half), current, costs, 2).speedup, 2)
    1.12
    """

    def step(work: Work) -> float:
        return costs.predict(work, size).step + waiting

    before, after = step(current), step(option.work) / option.batches
    first = step(option.warm_up) if option.warm_up else after
    run_speedup = before / (warm_up * first + (1 - warm_up) * after)
    return SpeedupEstimate(
        kind=option.kind,
        name=option.name,
        step=after,
        speedup=before / after,
        run_speedup=run_speedup,
        hours=None if hours is None else hours / run_speedup,
        wire_bytes=wire_bytes(option.work, size, costs.link.per_node) / option.batches,
        note=option.note,
        utilisation=costs.predict(option.work, size).utilisation,
    )


def wire_bytes(work: Work, size: int, per_node: int = 1) -> float:
    """Bytes that a worker sends in a step; with a hierarchy, to other machines, as the mean of a machine's workers.

    >>> from dataclasses import replace
    >>> work = Work(forward=1.0, backward=1.0, messages=(("all_gather", 100),))
    >>> [wire_bytes(replace(work, intra_node_bytes=n), 16, per_node=8) for n in (0, 400)]
    [1500.0, 12.5]
    """
    if work.local is not None:
        return work.local.wire_bytes(size)
    per_node = per_node if work.intra_node_bytes else 1
    return sum(WIRE_FACTOR[kind](size // per_node) * nbytes for kind, nbytes in work.messages) / per_node
