"""What a switch did: ranks, what was lost where, the loss before and after."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Entry, Plan
from .table import aligned
from .when import Position


@dataclass(frozen=True)
class Report:
    """What the switch did."""

    plan: Plan  # with ranks and errors
    position: Position
    loss: tuple[float, float] | None = None  # on the held batch, before and after

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
        where = ", ".join(
            f"{k} {v}" for k, v in vars(self.position).items() if v is not None and k != "total"
        )
        lines = [f"Switched to low rank at {where}: {b.parameters:,} → {a.parameters:,} parameters"]
        if self.loss is not None:
            lines.append("loss on the held batch: {:.4g} → {:.4g}".format(*self.loss))
        rows = [["worst layers", "rank", "energy kept", "relative error"]]
        rows += [[e.name, str(e.rank), f"{self.energy[e.name]:.1%}", f"{e.error:.3f}"] for e in self.worst]
        return "\n".join([*lines, aligned(rows, left=(0,))])
