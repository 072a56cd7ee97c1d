"""What a switch did: ranks, what was lost where, the loss before and after."""

from __future__ import annotations

from dataclasses import dataclass

from ..planning.plan import Entry, Plan
from ..planning.table import aligned
from .moments import Position


@dataclass(frozen=True)
class Report:
    """What the switch did."""

    plan: Plan  # with ranks and errors
    position: Position
    loss: tuple[float, float] | None = None  # on the held batch, before and after
    max_jump: float | None = None  # the limit it had
    merged: Position | None = None  # where it became full-rank again

    @property
    def energy(self) -> dict[str, float]:
        """Share of ‖W‖² that each changed layer kept: 1 − error²."""
        return {e.name: 1 - e.error**2 for e in self.plan if e.error is not None}

    @property
    def worst(self) -> list[Entry]:
        """The five layers that lost most."""
        changed = [e for e in self.plan if e.error is not None]
        return sorted(changed, key=lambda e: -(e.error or 0.0))[:5]

    def __str__(self) -> str:
        b, a = self.plan.before, self.plan.after
        first = f"Switched to low rank at {self.position}: {b.parameters:,} → {a.parameters:,} parameters"
        back = "" if self.merged is None else f"; merged back to full rank at {self.merged}"
        lines = [first + back]
        if self.loss is not None:
            lines.append("loss on the held batch: {:.4g} → {:.4g}".format(*self.loss))
        if self.max_jump is not None:
            lines.append(f"max_jump {self.max_jump:.0%}: {self._softened()}")
        rows = [["worst layers", "rank", "energy kept", "relative error"]]
        rows += [[e.name, str(e.rank), f"{self.energy[e.name]:.1%}", f"{e.error:.3f}"] for e in self.worst]
        return "\n".join([*lines, aligned(rows, left=(0,))])

    def _softened(self) -> str:
        """What `max_jump` changed, and where."""
        raised = [f"{e.name} ({e.asked} → {e.rank})" for e in self.plan if e.asked and e.rank]
        dense = [e.name for e in self.plan if e.asked and not e.rank]
        told = {"ranks raised": raised, "left dense": dense}
        return "; ".join(f"{k}: {_some(v)}" for k, v in told.items() if v) or "no rank had to be raised"


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return ", ".join(texts[:5]) + more
