"""`Choice`: a way to train and what it brings; `Ranking` predicts, `table` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planning.table import aligned
from .cost_model import CostModel, Work
from .link import WIRE
from .remedies import Remedy

WARM_UP = 1 / 3  # of a run, full-rank
#: Below this nothing is worth a change.
WORTH = 1.05


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A remedy and what it brings: predicted, or by the clock where `measured` is given."""

    kind: str
    name: str
    step: float  # seconds, predicted, for the batches of one step as it is
    speedup: float  # of a step
    run_speedup: float  # of the whole run, warm-up included
    hours: float | None  # of the whole run, where its steps are known
    wire_bytes: float  # a worker sends in a step
    note: str = ""
    measured: float | None = None  # seconds of a step, where it was run to check


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Says what remedies bring, against a step as it is.

    >>> from pufferfish.measure import Link
    >>> now = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),))
    >>> half = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 5 * 10**6),))
    >>> costs = CostModel(link=Link.of(bandwidth=1e9, latency=0, size=2, goodput=1))
    >>> ranking = Ranking(costs=costs, now=now, size=2)
    >>> round(ranking.choice(Remedy(kind="free", name="half", work=half)).speedup, 2)
    1.12
    """

    costs: CostModel
    now: Work
    size: int
    waiting: float = 0.0  # seconds of a step in which the slowest worker is waited for
    warm_up: float = WARM_UP  # share of a run that a remedy with a warm-up spends in it
    hours: float | None = None  # of the whole run as it is

    def step(self, work: Work) -> float:
        """Seconds."""
        return self.costs.predict(work, self.size).step + self.waiting

    def choice(self, remedy: Remedy) -> Choice:
        """What a remedy brings."""
        now, seconds = self.step(self.now), self.step(remedy.work) / remedy.batches
        warm = self.step(remedy.warm_up) if remedy.warm_up else seconds
        run = now / (self.warm_up * warm + (1 - self.warm_up) * seconds)
        return Choice(
            kind=remedy.kind,
            name=remedy.name,
            step=seconds,
            speedup=now / seconds,
            run_speedup=run,
            hours=None if self.hours is None else self.hours / run,
            wire_bytes=wire(remedy.work, self.size, self.costs.link.per_node) / remedy.batches,
            note=remedy.note,
        )


def wire(work: Work, size: int, per_node: int = 1) -> float:
    """Bytes that a worker sends in a step; on two levels, to other machines.

    >>> from dataclasses import replace
    >>> work = Work(forward=1.0, backward=1.0, messages=(("all_gather", 100),))
    >>> [wire(replace(work, inside=n), 16, per_node=8) for n in (0, 400)]
    [1500, 100]
    """
    size = size // per_node if work.inside else size
    return sum(WIRE[kind](size) * nbytes for kind, nbytes in (*work.messages, *work.gathers))


def table(choices: Sequence[Choice]) -> str:
    """A line for each; measured times beside the predicted ones, and the run's time, where they are known.

    >>> dense = Choice(kind="", name="dense", step=0.1, speedup=1, run_speedup=1, hours=0.25, wire_bytes=1e6, measured=0.11)
    >>> print(table([dense]))
        ms a step  measured  error  MB sent   step    run    time
    dense     100       110    -9%        1  1.00×  1.00×  15 min
    """
    checked = any(c.measured is not None for c in choices)
    kinds = any(c.kind for c in choices)
    timed = any(c.hours is not None for c in choices)
    head = [
        *[""] * kinds,
        "",
        "ms a step",
        *["measured", "error"] * checked,
        "MB sent",
        "step",
        "run",
        *["time"] * timed,
        "",
    ]
    rows = [head]
    for c in choices:
        against = ["", ""]
        if c.measured is not None:
            against = [f"{1e3 * c.measured:.4g}", f"{c.step / c.measured - 1:+.0%}"]
        rows.append([
            *[c.kind] * kinds, c.name, f"{1e3 * c.step:.4g}", *(against if checked else []),
            f"{c.wire_bytes / 1e6:.3g}", f"{c.speedup:.2f}×", f"{c.run_speedup:.2f}×",
            *[time(c.hours)] * timed, c.note,
        ])  # fmt: skip
    return aligned(rows, left=(0, kinds, len(head) - 1))


def time(hours: float | None) -> str:
    """In a unit that reads well.

    >>> time(30.0), time(0.5), time(0.03), time(0.001)
    ('30 h', '30 min', '108 s', '3.6 s')
    """
    if hours is None:
        return ""
    for unit, seconds in (("h", 3600), ("min", 60)):
        if hours * 3600 >= 2 * seconds:
            return f"{hours * 3600 / seconds:.3g} {unit}"
    short = hours * 3600
    return f"{short:.0f} s" if short >= 10 else f"{short:.2g} s"


def lap(seconds: float) -> str:
    """The same for a step.

    >>> lap(0.0123), lap(6.04)
    ('12.3 ms', '6.04 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
