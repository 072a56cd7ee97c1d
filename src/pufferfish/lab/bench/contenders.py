"""The models whose steps are timed: each as its runs have it at their end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...measure import read
from ...plan import Plan
from ...planning import plan
from ..choice import Choice, choice
from ..tasks.task import Recipe, Task
from ..train import optimizer
from .asked import Asked
from .cells import Cell, finished
from .timing import Contender


def contenders(
    methods: list[str], asked: Asked, root: Path, data: Any, *, rank: int, size: int, device: torch.device
) -> dict[str, Contender]:
    """One for each method that can be timed, on all ranks; batch and numbers are the recipe's."""
    task, recipe = asked.found()
    made = {}
    for method in methods:
        chosen = choice(method)
        ranks = _ranks(method, asked, root)
        if chosen.model == "auto" and ranks is None:
            continue  # only a run can tell
        torch.manual_seed(0)
        model = task.build()
        made_low = _plan(model, chosen, task, recipe, ranks)
        if device.type == "cuda":  # as `train` has it
            model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = next(
            task.batches(data, "train", recipe.batch, device=device, generator=torch.Generator().manual_seed(0),
                         rank=rank, size=size)
        )  # fmt: skip
        loss = _loss(task, recipe, batch, asked.precision, device)
        made[method] = Contender(
            chosen, model, lambda net: optimizer(net, recipe), loss, plan=made_low, clip=recipe.clip
        )
    return made


def _ranks(method: str, asked: Asked, root: Path) -> dict[str, int] | None:
    """By layer, of the finished run with the lowest seed."""
    folders = (root / Cell(method, seed).name for seed in range(asked.seeds))
    return next(map(_ranks_of, filter(finished, folders)), None)


def _ranks_of(folder: Path) -> dict[str, int]:
    return {layer["name"]: layer["rank"] for layer in read(folder).layers if layer["rank"] is not None}


def _plan(
    model: nn.Module, chosen: Choice, task: Task, recipe: Recipe, ranks: Mapping[str, int] | None
) -> Plan | None:
    if chosen.model not in ("pufferfish", "auto"):
        return None
    made = plan(model, recipe.rank, keep=task.keep if chosen.model == "pufferfish" else ())
    if ranks is None:
        return made
    return made.replace(
        e.ranked(ranks[e.name]) if e.name in ranks else e.stays("its run left it dense") for e in made
    )


def _loss(
    task: Task, recipe: Recipe, batch: Any, precision: str, device: torch.device
) -> Callable[[nn.Module], Tensor]:
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=precision != "fp32"):
            return task.loss(model, batch, recipe)

    return loss
