"""`Diagnosis`: the result of `diagnose`, to print or to save."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .estimate_table import estimate_table, format_seconds
from .link import Link
from .speedup_estimate import MIN_SPEEDUP, SpeedupEstimate


@dataclass(kw_only=True)
class Diagnosis:
    """Result of `diagnose`, filled when its block ends. Means over all workers, so equal on all of them.

    `dataclasses.asdict` makes a dict of it that JSON can hold.
    """

    workers: int = 1
    steps: int = 0  # timed steps
    parts: dict[str, float] = field(default_factory=dict)  # mean seconds per step, as in `Breakdown`
    waiting: float = 0.0  # seconds of the exchange spent waiting for the slowest worker
    link: Link | None = None
    predicted: float = 0.0  # seconds of the current step, by the cost model
    ceiling: float = 1.0  # speed-up of a step without any exchange
    hours: float | None = None  # of the whole run at the current speed
    wire_bytes: float = 0.0  # sent by a worker in the current step
    #: Number of steps → share of the trainable weights that, rounded to bf16, changed in so many steps.
    changed: dict[int, float] = field(default_factory=dict)
    options: list[SpeedupEstimate] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        """Seconds per step that communication costs: waiting for the exchange, encoding and decoding."""
        return self.parts["encode"] + self.parts["exchange"] + self.parts["decode"]

    @property
    def error(self) -> float:
        """Relative error of the cost model's prediction for the current step."""
        return self.predicted / self.parts["step"] - 1

    def __str__(self) -> str:
        if not self.parts:
            return "diagnose: no result yet; it is filled when the block ends"
        return "\n".join([*self._head(), "", *self._table()])

    def _head(self) -> Iterator[str]:
        p = {name: format_seconds(seconds) for name, seconds in self.parts.items()}
        compute, exposed = format_seconds(self.parts["step"] - self.exposed), format_seconds(self.exposed)
        yield f"{self.workers} worker{'s' if self.workers > 1 else ''}, {self.steps} timed steps"
        yield f"step:      {p['step']} = {compute} compute + {exposed} exposed exchange"
        names = ("data", "forward", "backward", "optimizer")
        yield "compute:   " + ", ".join(f"{name} {p[name]}" for name in names)
        if self.changed:
            shares = (f"{share:.2%} in {n} step{'s' * (n > 1)}" for n, share in self.changed.items())
            yield f"changed:   {', '.join(shares)}, of the weights in bf16"
        if self.link is None:
            yield "exchange:  none, one process"
            return
        compressed = self.parts["encode"] + self.parts["decode"] > 0
        coding = f"encode {p['encode']}, decode {p['decode']}, " if compressed else ""
        waiting = f"waiting for the slowest worker {format_seconds(self.waiting)}"
        yield f"exchange:  {coding}{waiting}; hidden behind backward {p['hidden']}"
        yield f"link:      {self.link}"
        predicted = f"{format_seconds(self.predicted)} per step ({self.error:+.0%})"
        yield f"predicted: {predicted}; without any exchange {self.ceiling:.2f}× as fast"

    def _table(self) -> Iterator[str]:
        current = SpeedupEstimate(
            kind="", name="current", step=self.predicted, speedup=1.0, run_speedup=1.0, hours=self.hours,
            wire_bytes=self.wire_bytes,
        )  # fmt: skip
        yield str(estimate_table([current, *self.options]))
        yield ""
        if all(e.run_speedup < MIN_SPEEDUP for e in self.options):
            yield "No option makes the run 5 % shorter: keep the current setup."
        yield "Predicted from this step, this link and dry runs on this device. Model quality is not predicted."
