"""`Diagnosis`: what a step costs in a job and what would pay, to print or to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .link import Link
from .ranking import WORTH, Choice, lap, table

__all__ = ["Choice", "Diagnosis"]


@dataclass(kw_only=True)
class Diagnosis:
    """What `diagnose` found, once its block is left. Equal on all ranks: means over them."""

    workers: int = 1
    steps: int = 0  # that were timed
    parts: dict[str, float] = field(default_factory=dict)  # mean seconds a step, as in `Breakdown`
    waiting: float = 0.0  # seconds of the exchange in which the slowest worker was waited for
    link: Link | None = None
    predicted: float = 0.0  # seconds of the step as it is, by the cost model
    ceiling: float = 1.0  # speed-up of a step if there were no exchange at all
    hours: float | None = None  # of the whole run as it is
    wire_bytes: float = 0.0  # a worker sends in a step as it is
    choices: list[Choice] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        """Seconds a step that the exchange costs: waiting for it, and what compression computes."""
        return self.parts["encode"] + self.parts["exchange"] + self.parts["decode"]

    @property
    def error(self) -> float:
        """Of the prediction for the step as it is, as a share of the measured one."""
        return self.predicted / self.parts["step"] - 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.parts:
            return "diagnose: not done yet"
        return "\n".join([*self._head(), "", self._table()])

    def _head(self) -> Iterator[str]:
        p = self.parts
        yield (
            f"{self.workers} worker{'s' if self.workers > 1 else ''}, {self.steps} steps: {lap(p['step'])} a step = "
            f"{lap(p['step'] - self.exposed)} computing (data {lap(p['data'])}, forward {lap(p['forward'])}, "
            f"backward {lap(p['backward'])}, optimizer {lap(p['optimizer'])}) + {lap(self.exposed)} exposed exchange"
        )
        if self.link is None:
            yield "one process: nothing to exchange"
            return
        coding = (
            f"encode {lap(p['encode'])}, decode {lap(p['decode'])}; " if p["encode"] + p["decode"] else ""
        )
        yield f"in it {coding}{lap(self.waiting)} waiting for the slowest; hidden behind backward {lap(p['hidden'])}"
        yield f"link got: {self.link}; the cost model says {lap(self.predicted)} a step ({self.error:+.0%})"
        yield f"no exchange at all, else as it is: {self.ceiling:.2f}×"

    def _table(self) -> str:
        now = Choice(
            kind="", name="as it is", step=self.predicted, speedup=1.0, run_speedup=1.0, hours=self.hours,
            wire_bytes=self.wire_bytes,
        )  # fmt: skip
        best = max(self.choices, key=lambda c: c.run_speedup, default=None)
        told = "predicted, from this step, this link and dry runs on this device; quality is another matter"
        if best is None or best.run_speedup < WORTH:
            told = f"nothing here makes the run 5 % shorter: stay with what you have\n{told}"
        return f"{table([now, *self.choices])}\n\n{told}"
