"""What a forward pass costs, for one row of a batch: an image, a sentence, a column of text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..rivals.model_change import Change
from .parts import Parts
from .screen import Screen

#: So many are counted together: sentences differ, and batch norms want several.
ROWS = 8


def macs_a_row(parts: Parts, change: Change, screen: Screen) -> dict[str, Any]:
    """{"macs": …} of the model as it is now; without it, and a word why, where they cannot be counted."""
    task, recipe = parts.task, parts.given.recipe
    rows = min(ROWS, recipe.batch)
    drawn = torch.Generator().manual_seed(0)  # the same rows for all methods
    batch = next(task.batches(parts.data, "train", rows, device=parts.device, generator=drawn))

    def example(model: nn.Module) -> Tensor:
        return task.loss(model, batch, recipe)

    try:
        return {"macs": round(change.macs(example) / rows)}
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        screen.say(f"MACs are not counted: {str(error).splitlines()[0]}")
        return {}
