"""`Advice`: the predicted or measured speed of training methods, and which one to use."""

from __future__ import annotations

import math
import os
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...measure import Link, SpeedupEstimate, Work
from ...measure.cost_model import COMPUTE_PARTS
from ...measure.options import (
    MIN_SPEEDUP,
    WARM_UP_FRACTION,
    as_code,
    estimate_table,
    format_hours,
    format_seconds,
)
from ...planning import Plan
from ...planning.text import Table
from ..method_name import training_method

#: Methods whose speedups differ by less than this factor count as equal; the simpler one is advised.
TOLERANCE = 1.03
#: Local steps change what is learned, so they are advised only if they are faster than all other methods by this factor,
#: and in runs with at least this many averages. A small GPT with 30 of them loses 0.4 bits per byte (docs/results.md).
LOCAL_SPEEDUP, MIN_AVERAGES = 1.5, 100


@dataclass(kw_only=True)
class Advice:
    """Speed of the training methods for a workload on a network; `str()` gives a readable summary."""

    workload: str
    network: str
    nodes: int
    per_node: int
    link: Link
    compute: Work  # a dense step without communication
    estimates: list[SpeedupEstimate]  # dense first, then from the simplest method to the most invasive
    plans: dict[str, Plan]  # of the low-rank methods, by name
    ceiling: float  # speedup of a dense step without communication
    #: Seconds of a low-rank step, by fraction of the full rank.
    rank_seconds: dict[float, float] = field(default_factory=dict)
    warm_up: float = WARM_UP_FRACTION
    checked: str = ""  # which methods were run; "": none
    rounds: int = 1  # how often the compute was measured
    busy: str = ""  # why the machine seems to be busy; "": it does not
    rows: int | None = None  # of one worker's batch
    steps: int | None = None  # of the whole run
    plan_file: str = ""  # where the plan is saved; "": nowhere

    @property
    def best(self) -> SpeedupEstimate:
        """The method to use: the simplest of the fastest ones, or "dense" if none is faster by `MIN_SPEEDUP`.

        If methods were run, only those are considered. Local steps must be faster by `LOCAL_SPEEDUP`, with `MIN_AVERAGES`.
        """
        every_step = [e for e in self._considered if not _is_local(e)]
        considered = [e for e in self._considered if not self._averages_too_rarely(e.name)]
        fastest = max(e.run_speedup for e in considered)
        if fastest < LOCAL_SPEEDUP * max(e.run_speedup for e in every_step):
            considered, fastest = every_step, max(e.run_speedup for e in every_step)
        simplest = next(e for e in considered if e.run_speedup * TOLERANCE >= fastest)
        return simplest if simplest.run_speedup >= MIN_SPEEDUP else self.estimates[0]

    @property
    def _considered(self) -> list[SpeedupEstimate]:
        return [e for e in self.estimates if e.measured is not None] or self.estimates

    @property
    def plan(self) -> Plan | None:
        """The plan of the advised method; None if it is not a low-rank method."""
        return self.plans.get(self.best.name)

    def top(self, n: int = 3) -> list[SpeedupEstimate]:
        """The advised method, then the fastest others."""
        others = sorted(self.estimates, key=lambda e: -e.run_speedup)
        return [self.best, *(e for e in others if e is not self.best)][:n]

    def with_measurements(self, steps: Mapping[str, Sequence[float]]) -> Advice:
        """Replace predictions by the medians of measurements.

        Args:
            steps: seconds of a step in each round, by method: dense, other methods, and what each of them uses in its
                warm-up.
        """
        dense = self.estimates[0]
        medians = {name: statistics.median(seconds) for name, seconds in steps.items()}

        def run_seconds(e: SpeedupEstimate, step: Mapping[str, float]) -> float:
            return self.warm_up * step[training_method(e.name).warm_up] + (1 - self.warm_up) * step[e.name]

        def measured(e: SpeedupEstimate) -> SpeedupEstimate:
            mean = run_seconds(e, medians)
            rounds = [dict(zip(steps, seconds, strict=True)) for seconds in zip(*steps.values(), strict=True)]
            return replace(
                e,
                measured=medians[e.name],
                speedup=medians[dense.name] / medians[e.name],
                run_speedup=medians[dense.name] / mean,
                interval=median_interval([r[dense.name] / run_seconds(e, r) for r in rounds]),
                hours=None if dense.hours is None else dense.hours * mean / (dense.measured or dense.step),
            )

        estimates = [measured(e) if e.name in steps else e for e in self.estimates]
        rounds = len(steps[dense.name])
        checked = f"{len(steps)} methods were run, interleaved"
        busy = busy_reason(steps[dense.name]) if rounds > 1 else ""
        return replace(self, estimates=estimates, checked=checked, rounds=rounds, busy=busy)

    def as_dict(self) -> dict[str, Any]:
        """The advice for JSON, without the plans."""
        return {
            "subject": self.workload,
            "network": self.network,
            "nodes": self.nodes,
            "per_node": self.per_node,
            "best": self.best.name,
            "ceiling": self.ceiling,
            "link": asdict(self.link),
            "computing": asdict(self.compute),
            "choices": [asdict(e) for e in self.estimates],
            "ranks": self.rank_seconds,
            "checked": self.checked,
            "rounds": self.rounds,
            "stable": is_stable(self.best),
            "busy": self.busy,
        }

    def parts(self) -> list[str | Table]:
        """The summary as paragraphs and a table."""
        rows = [self.estimates[0], *sorted(self._table_rows(), key=lambda e: -e.run_speedup)]
        texts = ["\n".join(lines) for lines in (self._recommendation(), self._code(), self._details())]
        return ["\n".join(self._header()), estimate_table(rows), *filter(None, texts)]

    def text(self, width: int) -> str:
        """The summary in lines of at most `width` characters, if the names of the methods allow that."""
        lines: list[str] = []
        for part in self.parts():
            fitted = part if isinstance(part, str) else str(part.fitted(width))
            wrap = isinstance(part, str)
            lines += [
                each
                for line in fitted.splitlines()
                for each in (textwrap.wrap(line, width) if wrap else [line])
            ]
            lines.append("")
        return "\n".join(lines[:-1])

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.parts()))

    def _table_rows(self) -> Iterator[SpeedupEstimate]:
        """All methods that were run; of the others the better of flat and hierarchical, to keep the table short."""
        speedups = {e.name: e.run_speedup for e in self.estimates}
        flat_names = {
            in_hierarchy(name): name
            for name in speedups
            if training_method(name).hierarchy == "flat" and training_method(name).local is None
        }
        for e in self.estimates[1:]:
            flat = flat_names.get(e.name, e.name)
            hierarchical_is_faster = speedups.get(in_hierarchy(flat), 0.0) > TOLERANCE * speedups[flat]
            if hierarchical_is_faster == (flat != e.name) or e is self.best or e.measured is not None:
                yield e

    def _header(self) -> Iterator[str]:
        size = self.nodes * self.per_node
        seconds = {name: getattr(self.compute, name) for name in COMPUTE_PARTS}
        parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in seconds.items())
        machines = f"{self.nodes} machine{'s' * (self.nodes > 1)} × {self.per_node}"
        batch = "" if self.rows is None else f" of {self.rows} row{'s' * (self.rows > 1)}"
        run = "" if self.steps is None else f", {self.steps:,} steps"
        yield f"{self.workload}: {size} worker{'s' * (size > 1)} ({machines}), network {self.network}{run}"
        yield f"compute, measured: {format_seconds(sum(seconds.values()))} per step{batch} ({parts})"
        if size > 1:
            source = "assumed" if self.link.extrapolated else "measured"
            bound = f"without communication a dense step is {self.ceiling:.2f}× as fast"
            slight = ": the network hardly matters" if self.ceiling < MIN_SPEEDUP else ""
            yield f"link, {source}: {self.link}; {bound}{slight}"

    def _recommendation(self) -> Iterator[str]:
        best, dense = self.best, self.estimates[0]
        if best is dense:
            limits = ["was run"] if self.checked else []
            limits += ["averages at every step"] if self._faster_local() else []
            which = "method that " + " and ".join(limits) if limits else "method"
            yield f"Use plain DDP: no {which} makes the run at least {MIN_SPEEDUP - 1:.0%} faster."
        else:
            hours = ""
            if best.hours is not None:
                hours = f", {format_hours(best.hours)} instead of {format_hours(dense.hours)}"
            reason = ""
            if best.run_speedup != max(
                e.run_speedup for e in self._considered if _is_local(e) <= _is_local(best)
            ):
                reason = f" It is the simplest method within {TOLERANCE - 1:.0%} of the fastest."
            low, high = best.interval or (best.run_speedup, best.run_speedup)
            between = f" ({low:.2f} to {high:.2f})" if f"{low:.2f}" != f"{high:.2f}" else ""
            speedups = f"{best.speedup:.2f}× per step, {best.run_speedup:.2f}×{between} for the run"
            yield f"{'Use' if low >= 1 else 'Perhaps use'} {best.name}: {speedups}{hours}.{reason}"
        if local := self._faster_local():
            condition = f"if they are {LOCAL_SPEEDUP}× as fast as the others"
            if self._averages_too_rarely(local.name):
                condition = f"for runs with at least {MIN_AVERAGES} averages"
            yield (
                f"{local.name} makes the run {local.run_speedup:.2f}× as fast, but local steps change what is learned: they "
                f"are recommended only {condition}."
            )
        yield from self._trust()

    def _averages_too_rarely(self, name: str) -> bool:
        """Whether a method makes local steps and the run has too few averages for them."""
        local = training_method(name).local
        return local is not None and self.steps is not None and self.steps < MIN_AVERAGES * local.h

    def _faster_local(self) -> SpeedupEstimate | None:
        """The fastest local steps, if they are faster than the advised method but are not advised themselves."""
        fastest = max(self._considered, key=lambda e: e.run_speedup)
        local = _is_local(fastest) and not _is_local(self.best)
        return fastest if local and fastest.run_speedup >= MIN_SPEEDUP * self.best.run_speedup else None

    def _details(self) -> Iterator[str]:
        """Lines about the basis of the recommendation."""
        if self.plan is not None:
            matrices = [e for e in self.plan if e.matrix is not None]
            count = sum(e.rank is not None for e in matrices)
            yield f"Low rank: {count} of {len(matrices)} matrices, after {self.warm_up:.0%} of the run in full rank."
        if self.rank_seconds:
            low, high = min(self.rank_seconds), max(self.rank_seconds)
            shortest, longest = (format_seconds(f(self.rank_seconds.values())) for f in (min, max))
            yield (
                f"The ranks that the model needs are known only at the switch: with {low:g} to {high:g} of the full rank, "
                f"and without compression or hierarchy, a low-rank step takes between {shortest} and {longest}."
            )
        checked = f" {self.checked}; their speedups are measured." if self.checked else ""
        kind = "95 % intervals" if self.rounds >= 6 else "from the lowest to the highest"
        rounds = (
            f" Figures are medians of {self.rounds} rounds, ranges are {kind}." if self.rounds > 1 else ""
        )
        yield f"Step times are predicted from measured compute and dry runs.{checked}{rounds}"
        yield "Model quality is not considered."

    def _trust(self) -> Iterator[str]:
        """How far the figures can be relied on."""
        if not is_stable(self.best):
            yield (
                f"Not stable: after {self.rounds} rounds of measurements the speedup is still uncertain by more than "
                f"{STABLE:.0%}. Run the command again on a quiet machine."
            )
        if self.busy:
            yield f"This machine seems busy: {self.busy}. Compute times are those of a busy machine."

    def _code(self) -> Iterator[str]:
        """The advised method as lines of a user's training script; none for plain DDP."""
        if self.best is self.estimates[0]:
            return
        yield "In your code:"
        method = training_method(self.best.name)
        if self.plan is not None:
            hint = "" if self.plan_file else "  # rerun with --out plan.json, which writes it"
            yield f'plan = pf.Plan.load("{self.plan_file or "plan.json"}"){hint}'
            yield f"switch = pf.Switch(plan, when=pf.AtFraction({self.warm_up:.2g}))"
        if method.local is not None:
            yield f"local = {method.local.as_code()}"
            yield "local.start(model)  # no DDP wrapper; local.step(model) after every update"
        if method.compress is not None:
            node = ', hierarchy="node"' if method.hierarchy == "node" else ""
            yield f"hook = pf.compress(ddp, {as_code(method.compress)}, optimizer=optimizer{node})"


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


def _is_local(estimate: SpeedupEstimate) -> bool:
    return training_method(estimate.name).local is not None


def simplicity(name: str) -> tuple[int, bool]:
    """Sort key: dense, bf16, low rank, then larger compression errors, then local steps; each without a hierarchy first.

    >>> sorted(["diloco(30)", "int8", "pufferfish", "bf16(hierarchy=node)", "bf16", "dense"], key=simplicity)
    ['dense', 'bf16', 'bf16(hierarchy=node)', 'pufferfish', 'int8', 'diloco(30)']
    """
    method = training_method(name)
    simple = ["dense", "bf16", "pufferfish", "pufferfish+bf16"]
    plain = [in_hierarchy(each) for each in simple]
    last = len(simple) + (method.local is not None)
    place = simple.index(name) if name in simple else plain.index(name) if name in plain else last
    return place, method.hierarchy == "node"


def in_hierarchy(name: str) -> str:
    """The name of a method with averages within each machine first.

    >>> [in_hierarchy(name) for name in ("dense", "pufferfish", "pufferfish+powersgd(4)")]
    ['none(hierarchy=node)', 'pufferfish+none(hierarchy=node)', 'pufferfish+powersgd(4,hierarchy=node)']
    """
    method = training_method(name)
    exchange = method.exchange or "none"
    node = f"{exchange[:-1]},hierarchy=node)" if exchange.endswith(")") else f"{exchange}(hierarchy=node)"
    return (
        node if method.name in ("dense", method.exchange) else f"{name.removesuffix('+' + exchange)}+{node}"
    )
