"""`Advice`: which way to train pays, to print or to keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...measure import Choice, Link, Work
from ...measure.ranking import WARM_UP, WORTH, lap, table, time
from ...measure.remedies import as_code
from ...planning.plan import Plan
from .ways import NODE, full_rank, named

#: Of two ways that differ by less, the simpler one is advised.
SAME = 1.03


@dataclass(kw_only=True)
class Advice:
    """What was found for a subject on a network. The first choice is dense training, the others are in order."""

    subject: str
    network: str  # as it was asked for
    nodes: int
    per_node: int
    engine: str
    link: Link
    computing: Work  # of a dense step
    choices: list[Choice]
    plans: dict[str, Plan]  # of the low-rank choices, by their names
    ceiling: float  # speed-up of a dense step without any exchange
    ranks: dict[float, float] = field(
        default_factory=dict
    )  # share of the full rank → seconds of a low-rank step
    warm_up: float = WARM_UP
    checked: str = ""  # where the best were run

    @property
    def best(self) -> Choice:
        """The way to train, of those that were run if some were; "dense" where nothing pays.

        Choices are in the order of what they ask of the user.
        """
        most = max(c.run_speedup for c in self._among)
        first = next(c for c in self._among if c.run_speedup * SAME >= most)
        return first if first.run_speedup >= WORTH else self.choices[0]

    @property
    def _among(self) -> list[Choice]:
        return [c for c in self.choices if c.measured is not None] or self.choices

    @property
    def plan(self) -> Plan | None:
        """What should become low-rank, where something should."""
        return self.plans.get(self.best.name)

    def top(self, n: int = 3) -> list[Choice]:
        """The advised one, then the fastest."""
        others = sorted(self.choices, key=lambda c: -c.run_speedup)
        return [self.best, *(c for c in others if c is not self.best)][:n]

    def clocked(self, steps: Mapping[str, float]) -> Advice:
        """With measured seconds of a step, by the names of ways: dense, others, and what each of them begins as."""
        dense = self.choices[0]
        now = steps[dense.name]

        def by_the_clock(c: Choice) -> Choice:
            seconds = steps[c.name]
            mean = self.warm_up * steps[full_rank(c.name)] + (1 - self.warm_up) * seconds
            hours = None if dense.hours is None else dense.hours * mean / (dense.measured or dense.step)
            return replace(c, measured=seconds, speedup=now / seconds, run_speedup=now / mean, hours=hours)

        choices = [by_the_clock(c) if c.name in steps else c for c in self.choices]
        return replace(self, choices=choices, checked=f"{len(steps)} were run, by turns")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a plan has a file of its own."""
        found = {name: getattr(self, name) for name in ("subject", "network", "nodes", "per_node", "engine")}
        return found | {
            "best": self.best.name,
            "ceiling": self.ceiling,
            "link": self.link.as_dict(),
            "computing": asdict(self.computing),
            "choices": [asdict(c) for c in self.choices],
            "ranks": self.ranks,
            "checked": self.checked,
        }

    def __str__(self) -> str:
        order = [self.choices[0], *sorted(self._shown(), key=lambda c: -c.run_speedup)]
        return "\n".join([*self._head(), "", table(order), "", *self._told()])

    def _shown(self) -> Iterator[Choice]:
        """Of a way on one level and on two only the better, so that the table stays short; and all that were run."""
        speeds = {c.name: c.run_speedup for c in self.choices}
        for c in self.choices[1:]:
            flat = c.name.removesuffix(NODE)
            levels = speeds.get(flat + NODE, 0.0) > SAME * speeds[flat]
            if levels == c.name.endswith(NODE) or c is self.best or c.measured is not None:
                yield c

    def _head(self) -> Iterator[str]:
        w, size = self.computing, self.nodes * self.per_node
        parts = ", ".join(f"{n} {lap(getattr(w, n))}" for n in ("data", "forward", "backward", "optimizer"))
        where = f"{self.nodes} machine{'s' * (self.nodes > 1)} × {self.per_node}"
        yield f"{self.subject}: {size} worker{'s' * (size > 1)} ({where}), {self.engine}, network {self.network}"
        yield f"computing, measured: {lap(w.forward + w.backward + w.optimizer + w.data)} a step ({parts})"
        if size > 1:
            got = "taken as" if self.link.extrapolated else "got"
            yield f"link {got}: {self.link}; no exchange at all, dense: {self.ceiling:.2f}×"

    def _told(self) -> Iterator[str]:
        best, dense = self.best, self.choices[0]
        if best is dense:
            plain = "FSDP2" if self.engine == "fsdp2" else "DDP"
            which = "that was run" if self.checked else "here"
            yield f"Use plain {plain}: nothing {which} makes the run 5 % shorter."
        else:
            whole = "" if best.hours is None else f", {time(best.hours)} in place of {time(dense.hours)}"
            fastest = max(c.run_speedup for c in self._among)
            why = (
                ""
                if best.run_speedup == fastest
                else f" It is the simplest within {SAME - 1:.0%} of the fastest."
            )
            yield f"Use {best.name}: {best.speedup:.2f}× a step, {best.run_speedup:.2f}× the run{whole}.{why}"
        if self.engine == "ddp" and (code := [*self._code()]):
            yield f"In your code: {', '.join(code)}."
        if self.plan is not None:
            matrices = [e for e in self.plan if e.matrix is not None]
            chosen = sum(e.rank is not None for e in matrices)
            yield f"Low-rank: {chosen} of {len(matrices)} matrices, after {self.warm_up:.0%} of the run in full rank."
        if self.ranks:
            low, high = min(self.ranks), max(self.ranks)
            yield (
                f"Which ranks will do is known only at the switch: from {low:g} to {high:g} of the full ones a step of "
                f"low rank alone takes {lap(self.ranks[low])} to {lap(self.ranks[high])}."
            )
        checked = (
            f" {self.checked}: what those bring is by the clock, not so the other rows."
            if self.checked
            else ""
        )
        yield f"Steps are predicted, from measured computing and dry runs.{checked} Quality is another matter."

    def _code(self) -> Iterator[str]:
        """What the advised way is in a loop of the user's own."""
        chosen, levels = named(self.best.name)
        if self.plan is not None:
            yield f"pf.Switch(plan, when=pf.AtFraction({self.warm_up:.2g}))"
        if chosen.compress is not None:
            node = ', levels="node"' if levels == "node" else ""
            yield f"pf.compress(ddp, {as_code(chosen.compress)}{node})"
