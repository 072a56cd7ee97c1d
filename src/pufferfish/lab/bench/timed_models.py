"""The models whose steps are timed: each as its runs have it at their end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.checkpoint_folder import saved
from ...layers.names import unwrap
from ...measure import read
from ...planning.planner import plan
from ...switching.moments import AtStep
from ...switching.switch import Switch
from ..advise.contender import Contender
from ..rivals.rival_by_name import is_rival, make
from ..tasks.task import Recipe, Task
from ..train import optimizer
from ..train.process_group import placed
from .bench_settings import Asked
from .cells import Cell, finished
from .entry import entry
from .summary import rounds_of

Become = Callable[[nn.Module, torch.optim.Optimizer], object]


def lacking(asked: Asked, root: Path) -> list[str]:
    """The methods of which fewer rounds were timed than asked for, and whose model is known by now."""
    rounds = rounds_of(root)
    few = [m for m in asked.methods if sum(m in r["methods"] for r in rounds) < asked.rounds]
    return [m for m in few if not _told_by_run(m) or _run_of(m, asked, root)]


def contenders(
    methods: list[str], asked: Asked, root: Path, data: Any, *, rank: int, size: int, device: torch.device
) -> dict[str, Contender]:
    """One for each method, on all ranks; batch and numbers are the recipe's."""
    task, usual = asked.found()
    made = {}
    for method in methods:
        chosen, recipe = entry(method).choice, entry(method).recipe(usual)
        torch.manual_seed(0)
        model = placed(task.build(), device)
        batch = next(
            task.batches(data, "train", recipe.batch, device=device, generator=torch.Generator().manual_seed(0),
                         rank=rank, size=size)
        )  # fmt: skip
        made[method] = Contender(
            chosen,
            model,
            lambda net, recipe=recipe: optimizer(net, recipe),  # type: ignore[misc]
            _loss(task, recipe, batch, asked.precision, device),
            become=_become(method, task, recipe, data, _run_of(method, asked, root)),
            clip=recipe.clip,
        )
    return made


def _told_by_run(method: str) -> bool:
    """Whether only a run can tell what becomes of the model."""
    model = entry(method).choice.model
    return model == "auto" or is_rival(model)


def _run_of(method: str, asked: Asked, root: Path) -> Path | None:
    """The finished run with the lowest seed; of a rival, one that has its ticket still."""
    folders = (root / Cell(method, seed).name for seed in range(asked.seeds))
    ticket = is_rival(entry(method).choice.model)
    return next((f for f in folders if finished(f) and (not ticket or saved(f / "checkpoints"))), None)


def _become(method: str, task: Task, recipe: Recipe, data: Any, run: Path | None) -> Become | None:
    word = entry(method).choice.model
    if is_rival(word):
        assert run is not None
        an_epoch, tickets = task.steps(data, recipe.batch), run / "checkpoints"
        return lambda model, own: make(word, model, own, epochs=recipe.epochs, an_epoch=an_epoch).restore(
            tickets
        )
    if word not in ("pufferfish", "auto"):
        return None

    def switch(model: nn.Module, own: torch.optim.Optimizer) -> None:
        made = plan(unwrap(model), recipe.rank, keep=task.keep if word == "pufferfish" else ())
        if run is not None:
            ranks = {layer["name"]: layer["rank"] for layer in read(run).layers if layer["rank"] is not None}
            made = made.replace(
                e.ranked(ranks[e.name]) if e.name in ranks else e.stays("its run left it dense") for e in made
            )
        Switch(made, when=AtStep(0)).step(model, own, step=0)

    return switch


def _loss(
    task: Task, recipe: Recipe, batch: Any, precision: str, device: torch.device
) -> Callable[[nn.Module], Tensor]:
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=precision != "fp32"):
            return task.loss(model, batch, recipe)

    return loss
