"""`Ticket`: which channels an Early-Bird ticket keeps."""

from __future__ import annotations

from dataclasses import dataclass

from ...planning.table import aligned


@dataclass(frozen=True)
class Ticket:
    """What was drawn. Groups of channels go by the name of their first batch norm.

    Args:
        epoch: how many were trained before.
        sizes: the channels that a group had.
        kept: those that stay.
        parameters: of the model, before and after.

    >>> print(Ticket(4, {"bn1": 4}, {"bn1": [0, 2]}, (1000, 400)))
    Early-Bird ticket drawn after 4 epochs: 1,000 → 400 parameters
    channels of  before  after
    bn1               4      2
    """

    epoch: int
    sizes: dict[str, int]
    kept: dict[str, list[int]]
    parameters: tuple[int, int]

    def __str__(self) -> str:
        before, after = self.parameters
        rows = [["channels of", "before", "after"]]
        rows += [[name, str(size), str(len(self.kept[name]))] for name, size in self.sizes.items()]
        first = f"Early-Bird ticket drawn after {self.epoch} epochs: {before:,} → {after:,} parameters"
        return f"{first}\n{aligned(rows, left=(0,))}"
