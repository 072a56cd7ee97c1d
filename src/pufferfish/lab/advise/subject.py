"""`Subject`: what advice is about, a model with batches and a loss, from a task or from a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree

from ...compression.parse_method import module_at
from ...measure.ranking import WARM_UP
from ..models.factory import LOSS, called, load_factory
from ..tasks.find import TASKS, find
from ..tasks.task import Recipe, Task


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Everything it takes to run one worker's steps."""

    name: str
    build: Callable[[], nn.Module]  # the same model every time
    batch: Callable[[], Any]  # the next one, of this worker
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], optim.Optimizer]
    keep: Sequence[str] = ()  # layers that stay full-rank in any case
    rank: float = 0.25
    steps: int | None = None  # of the whole run
    warm_up: float = WARM_UP
    device: str = "cpu"
    precision: str = "fp32"
    clip: float | None = None  # largest norm of the gradients

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, in the precision that was asked for."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        with torch.autocast(torch.device(self.device).type, dtype, enabled=self.precision != "fp32"):
            return self.loss(model, batch)


def subject(
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
) -> Subject:
    """A task by its name, or `file.py:factory`, for worker `rank` of `size`.

    >>> subject("digits:mlp", size=4).steps
    240
    """
    common = {"device": device, "precision": precision}
    found = find(text) if _is_task(text) else None
    if found is None:
        if batch is not None:
            raise ValueError(f"--batch {batch}: {text} brings its own batch; change it there")
        if recipe is not None:
            raise ValueError(f"--recipe {recipe}: {text} is no task and has none; leave it out")
        about = _from_factory(text, device)
    else:
        about = _from_task(found, recipe or "short", batch, data, rank, size, device)
    changed = {key: x for key, x in (("keep", keep), ("steps", steps)) if x is not None}
    return replace(about, **common, **changed)  # type: ignore[arg-type]


def _is_task(text: str) -> bool:
    """Else it is a factory of models."""
    place, colon, name = text.rpartition(":")
    if not colon or text.partition(":")[0] in TASKS:
        return True
    found = getattr(module_at(place), name, None)
    return isinstance(found, Task) or (isinstance(found, type) and issubclass(found, Task))


def _from_task(
    task: Task, recipe: str, batch: int | None, data: Path | None, rank: int, size: int, device: str
) -> Subject:
    from ..train import optimizer  # it is a large module
    from ..train.process_group import placed

    numbers = task.recipe(recipe)
    numbers = numbers if batch is None else replace(numbers, batch=batch)
    if numbers.batch % size:
        raise ValueError(
            f"a batch of {numbers.batch} does not go to {size} workers in equal parts; change --batch"
        )
    loaded = task.load(data)
    batches = _endless(task, numbers, loaded, rank, size, device)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return placed(task.build(), device)

    return Subject(
        name=repr(task),
        build=build,
        batch=lambda: next(batches),
        loss=lambda model, batch: task.loss(model, batch, numbers),
        optimizer=lambda model: optimizer(model, numbers),
        keep=task.keep,
        rank=numbers.rank,
        clip=numbers.clip,
        steps=numbers.epochs * task.steps(loaded, numbers.batch),
        warm_up=WARM_UP if numbers.switch_at is None else numbers.switch_at / numbers.epochs,
    )


def _endless(task: Task, recipe: Recipe, data: Any, rank: int, size: int, device: str) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from task.batches(
            data, "train", recipe.batch, device=device, generator=generator, rank=rank, size=size
        )


def _from_factory(text: str, device: str) -> Subject:
    factory = load_factory(text)
    made = factory()
    model, batch, loss_fn = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    if not isinstance(model, nn.Module) or batch is None:
        raise ValueError(f"{text}: a step takes a model and a batch; return (model, batch[, loss_fn])")
    batch = pytree.tree_map_only(Tensor, lambda x: x.to(device), batch)

    def build() -> nn.Module:
        torch.manual_seed(0)
        fresh = factory()
        return (fresh[0] if isinstance(fresh, tuple) else fresh).to(device)  # type: ignore[no-any-return]

    return Subject(
        name=text,
        build=build,
        batch=lambda: batch,
        loss=lambda model, batch: _loss(text, loss_fn, model, batch),
        optimizer=lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    )


def _loss(text: str, loss_fn: Callable[[nn.Module, Any], Any] | None, model: nn.Module, batch: Any) -> Tensor:
    if loss_fn is None:
        return called(text, "the model on its batch", _sum, model, batch)  # type: ignore[no-any-return]
    loss = called(text, LOSS, loss_fn, model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        )
        raise ValueError(f"{text}: {LOSS} returned {got}, not a loss: one number, with its gradient")
    return loss


def _sum(model: nn.Module, batch: Any) -> Tensor:
    """Of all that the model puts out."""
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise ValueError("the model's output has no gradient; return (model, batch, loss_fn)")
    total = leaves[0].float().sum()
    for x in leaves[1:]:
        total = total + x.float().sum()
    return total
