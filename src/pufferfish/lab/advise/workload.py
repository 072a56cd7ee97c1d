"""`Workload`: a model with batches, a loss and an optimizer, from a task or from a user's function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree

from ...compression.parse_method import import_path
from ...measure.speedup_estimate import WARM_UP_FRACTION
from ..models.load_factory import LOSS_CALL, call_user_code, load_factory
from ..tasks import TASKS, Task, find_task


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
    warm_up: float = WARM_UP_FRACTION
    device: str = "cpu"
    precision: str = "fp32"
    clip: float | None = None  # maximum norm of the gradients

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, computed in `precision`."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        with torch.autocast(torch.device(self.device).type, dtype, enabled=self.precision != "fp32"):
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
        text: name of a task, or `file.py:factory`.
        recipe: recipe of the task; "short" by default.
        batch, keep, steps: global batch size, full-rank layers and steps of the run, instead of the task's.

    >>> load_workload("digits:mlp", size=4).steps
    240
    """
    if _is_task(text):
        workload = _from_task(find_task(text), recipe or "short", batch, data, rank, size, device)
    else:
        if batch is not None:
            raise ValueError(f"--batch {batch}: {text} has its own batch; change the batch size there")
        if recipe is not None:
            raise ValueError(f"--recipe {recipe}: {text} is not a task and has no recipes; remove --recipe")
        workload = _from_factory(text, device)
    keep, steps = workload.keep if keep is None else keep, workload.steps if steps is None else steps
    return replace(workload, device=device, precision=precision, keep=keep, steps=steps)


def _is_task(text: str) -> bool:
    """Whether the text names a task; otherwise it names a factory."""
    place, colon, name = text.rpartition(":")
    if not colon or text.partition(":")[0] in TASKS:
        return True
    value = getattr(import_path(place), name, None)
    return isinstance(value, Task) or (isinstance(value, type) and issubclass(value, Task))


def _from_task(
    task: Task, recipe_name: str, batch: int | None, data: Path | None, rank: int, size: int, device: str
) -> Workload:
    from ..train import build_optimizer  # a large import
    from ..train.worker_device import move_to_device

    recipe = task.recipe(recipe_name)
    recipe = recipe if batch is None else replace(recipe, batch=batch)
    if recipe.batch % size:
        raise ValueError(
            f"a batch of {recipe.batch} cannot be split equally over {size} workers; change --batch"
        )
    loaded = task.load(data)
    options: dict[str, Any] = {"device": device, "worker": rank, "world_size": size}
    options["generator"] = torch.Generator().manual_seed(0)
    batches = chain.from_iterable(task.batches(loaded, "train", recipe.batch, **options) for _ in count())

    def build() -> nn.Module:
        torch.manual_seed(0)
        return move_to_device(task.build(), device)

    return Workload(
        name=repr(task),
        build=build,
        batch=lambda: next(batches),
        loss=lambda model, batch: task.loss(model, batch, recipe),
        optimizer=lambda model: build_optimizer(model, recipe),
        keep=task.keep,
        rank=recipe.rank,
        clip=recipe.clip,
        steps=recipe.epochs * task.steps(loaded, recipe.batch),
        warm_up=WARM_UP_FRACTION if recipe.switch_at is None else recipe.switch_at / recipe.epochs,
    )


def _from_factory(text: str, device: str) -> Workload:
    factory = load_factory(text)
    parts = factory()
    model, batch, loss_fn = (*parts, None, None)[:3] if isinstance(parts, tuple) else (parts, None, None)
    if not isinstance(model, nn.Module) or batch is None:
        raise ValueError(f"{text}: must return (model, batch) or (model, batch, loss_fn)")
    batch = pytree.tree_map_only(Tensor, lambda x: x.to(device), batch)

    def build() -> nn.Module:
        torch.manual_seed(0)
        parts = factory()
        return (parts[0] if isinstance(parts, tuple) else parts).to(device)  # type: ignore[no-any-return]

    return Workload(
        name=text,
        build=build,
        batch=lambda: batch,
        loss=lambda model, batch: _loss(text, loss_fn, model, batch),
        optimizer=lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    )


def _loss(text: str, loss_fn: Callable[[nn.Module, Any], Any] | None, model: nn.Module, batch: Any) -> Tensor:
    if loss_fn is None:
        return call_user_code(text, "the model on its batch", _sum_of_outputs, model, batch)  # type: ignore[no-any-return]
    loss = call_user_code(text, LOSS_CALL, loss_fn, model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        result = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{text}: {LOSS_CALL} returned {result}; return a scalar tensor that requires grad")
    return loss


def _sum_of_outputs(model: nn.Module, batch: Any) -> Tensor:
    """Stands in for a loss: the sum of all outputs of the model."""
    positional = batch if isinstance(batch, tuple) else (batch,)
    output = model(**batch) if isinstance(batch, dict) else model(*positional)
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise ValueError("the model's output does not require grad; return (model, batch, loss_fn)")
    return sum((x.float().sum() for x in leaves[1:]), leaves[0].float().sum())
