"""`macs_per_row`: MACs of a forward pass for one row of a batch, such as an image, a sentence or a column of text."""

from typing import Any

import torch
from torch import Tensor, nn

from ..rivals.model_change import ModelChange
from ..tasks import Batch, Recipe, Task
from .console import Console
from .run_components import RunComponents

#: Rows that are counted at once: sentences differ in length, and batch norms need several rows.
ROWS = 8


def few_rows(task: Task, recipe: Recipe, data: Any, device: torch.device) -> Batch:
    """A small batch of training data, the same rows for all methods."""
    generator = torch.Generator().manual_seed(0)
    return next(task.batches(data, "train", min(ROWS, recipe.batch), device=device, generator=generator))


def macs_per_row(components: RunComponents, change: ModelChange, console: Console) -> dict[str, Any]:
    """Return {"macs": …} for the current model; an empty dict, and a message why, where they cannot be counted."""
    task, recipe = components.task, components.settings.recipe
    rows = min(ROWS, recipe.batch)
    batch = few_rows(task, recipe, components.data, components.device)

    def example(model: nn.Module) -> Tensor:
        return task.loss(model, batch, recipe)

    try:
        return {"macs": round(change.forward_macs(example) / rows)}
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        console.info(f"MACs are not counted: {str(error).splitlines()[0]}")
        return {}
