"""What training in rounds costs, all of them together, and what a network with zeros would."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...layers import low_rank_type
from ...layers.names import named_modules
from ...planning.profile import Example, profile
from ...planning.table import aligned


@dataclass(frozen=True)
class Round:
    """One training from the rewound weights: with how many weights, and what it cost.

    Args:
        weights: those not pruned.
        steps: updates made.
        seconds: from its start, validation included.
    """

    weights: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """All rounds so far. `epochs` and `macs` are None where what they are made of was not told."""

    rounds: tuple[Round, ...]
    steps: int
    seconds: float
    epochs: float | None = None
    macs: int | None = None

    def __str__(self) -> str:
        rows = [["round", "weights", "updates", "seconds"]]
        rows += [
            [str(i), f"{r.weights:,}", f"{r.steps:,}", f"{r.seconds:.1f}"] for i, r in enumerate(self.rounds)
        ]
        rows.append(["all", "", f"{self.steps:,}", f"{self.seconds:.1f}"])
        more = [f"{self.epochs:g} epochs"] if self.epochs is not None else []
        more += [f"{self.macs:.3g} MACs"] if self.macs is not None else []
        return "\n".join([aligned(rows, left=()), *([", ".join(more)] if more else [])])


def nonzero_macs(model: nn.Module, example: Example) -> int:
    """Forward MACs if multiplications with zero weights were left out. No common hardware does so.

    >>> import torch
    >>> layer = nn.Linear(4, 2, bias=False)
    >>> _ = layer.weight.data[0].zero_()
    >>> nonzero_macs(layer, torch.ones(3, 4))
    12
    """
    calls = profile(model, example).calls
    total = 0
    for name, _, module in named_modules(model):
        kind = low_rank_type(type(module))
        if kind is not None and name in calls:
            for x in kind.matrices(module):
                rows = module.get_parameter(x.weight).detach()[x.rows]
                total += int(rows.count_nonzero()) * calls[name].positions[x.name]
    return total
