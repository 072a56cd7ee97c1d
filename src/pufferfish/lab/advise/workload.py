"""`Workload`: a model with batches, a loss and an optimizer, from a task or a user's file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...measure.options import WARM_UP_FRACTION
from ..tasks import Batch, Task, find_task
from ..tasks.file_task import FileTask


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that is needed to run the training steps of one worker."""

    name: str
    build: Callable[[], nn.Module]  # builds the same model on each call
    batch: Callable[[], Any]  # the next batch of this worker
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], Any]  # an optimizer or an `OptimizerList`
    keep: Sequence[str] = ()  # layers that stay full-rank
    rank: float = 0.25
    steps: int | None = None  # of the whole run
    rows: int | None = None  # of one worker's batch
    warm_up: float = WARM_UP_FRACTION
    device: str = "cpu"
    precision: str = "fp32"
    clip: float | None = None  # maximum norm of the gradients

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, computed in `precision`."""
        kind = torch.device(self.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.loss(model, batch)


def load_workload(
    text: str,
    *,
    rank: int = 0,
    size: int = 1,
    device: str = "cpu",
    precision: str = "fp32",
    recipe: str | None = None,
    batch: int | None = None,
    data: Path | None = None,
    keep: Sequence[str] | None = None,
    steps: int | None = None,
) -> Workload:
    """Load the workload of worker `rank` of `size`.

    Args:
        text: name of a task, or `file.py`.
        recipe: recipe of the task; "short" by default.
        batch, keep, steps: global batch size, full-rank layers and steps of the run, instead of the task's.

    >>> load_workload("digits:mlp", size=4).steps
    240
    """
    workload = _from_task(find_task(text), recipe or "short", batch, data, rank, size, device)
    keep, steps = workload.keep if keep is None else keep, workload.steps if steps is None else steps
    return replace(workload, device=device, precision=precision, keep=keep, steps=steps)


def _from_task(
    task: Task, recipe_name: str, batch: int | None, data: Path | None, rank: int, size: int, device: str
) -> Workload:
    from ..train import build_optimizer  # a large import
    from ..train.workers import move_to_device

    recipe = task.recipe(recipe_name)
    recipe = recipe if batch is None else replace(recipe, batch=batch)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return move_to_device(task.build(), device)

    batches: Iterator[Batch]
    steps = None
    if isinstance(task, FileTask) and _has_example(task, batch):
        example = task.example(build(), device)
        batches, rows = repeat(example), len(example[0]) if example[0].dim() else None
    else:
        if recipe.batch % size:
            raise ValueError(
                f"a batch of {recipe.batch} cannot be split equally over {size} workers; change --batch"
            )
        rows = recipe.batch // size
        loaded = task.load(data)
        steps = recipe.epochs * task.steps(loaded, recipe.batch)
        task.check(build(), loaded, device)
        options: dict[str, Any] = {"device": device, "worker": rank, "world_size": size}
        options["generator"] = torch.Generator().manual_seed(0)
        batches = chain.from_iterable(task.batches(loaded, "train", recipe.batch, **options) for _ in count())
    return Workload(
        name=task.name if isinstance(task, FileTask) else repr(task),
        build=build,
        batch=lambda: next(batches),
        loss=lambda model, batch: task.loss(model, batch, recipe),
        optimizer=lambda model: build_optimizer(model, recipe),
        keep=task.keep,
        rank=recipe.rank,
        clip=recipe.clip,
        steps=steps,
        rows=rows,
        warm_up=WARM_UP_FRACTION if recipe.switch_at is None else recipe.switch_at / recipe.epochs,
    )


def _has_example(task: FileTask, batch: int | None) -> bool:
    """Whether a user's file gives one worker's batch; otherwise batches come from its data."""
    example, data = task.file.function("example"), task.file.function("data")
    if example is None and data is None:
        raise ValueError(
            f"{task.name} has neither data() nor example(); add `def example(): return inputs, targets` for one worker's batch"
        )
    if data is None and batch is not None:
        raise ValueError(f"--batch {batch}: example() of {task.name} is the batch; change its size there")
    return example is not None and batch is None
