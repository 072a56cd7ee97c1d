"""`macs_per_row`: MACs of a forward pass for one row of a batch, such as an image, a sentence or a column of text."""

from typing import Any

import torch
from torch import Tensor, nn

from ..rivals.model_change import ModelChange
from .console import Console
from .run_components import RunComponents

#: Rows that are counted at once: sentences differ in length, and batch norms need several rows.
ROWS = 8


def macs_per_row(components: RunComponents, change: ModelChange, console: Console) -> dict[str, Any]:
    """Return {"macs": …} for the current model; an empty dict, and a message why, where they cannot be counted."""
    task, recipe = components.task, components.settings.recipe
    rows = min(ROWS, recipe.batch)
    generator = torch.Generator().manual_seed(0)  # the same rows for all methods
    batch = next(task.batches(components.data, "train", rows, device=components.device, generator=generator))

    def example(model: nn.Module) -> Tensor:
        return task.loss(model, batch, recipe)

    try:
        return {"macs": round(change.forward_macs(example) / rows)}
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        console.info(f"MACs are not counted: {str(error).splitlines()[0]}")
        return {}
