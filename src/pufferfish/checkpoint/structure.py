"""What a model and its optimizers must look like to receive a checkpoint, known before they are changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn, optim
from torch.distributed.tensor import DTensor

from ..layers import hollow
from ..layers.names import own_name, unwrap
from ..lowrank.checks import fit
from ..lowrank.factorize import by_nan, by_svd, convert, ranks_of
from ..optim.by_name import group_names, names_of
from ..planning.plan import Plan
from ..switching.job import Job

Ranks = dict[str, dict[str, int]]


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def expected(
    path: Path,
    ranks: Ranks,
    plan: Plan | None,
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer] = (),
    may_change: bool = True,
) -> tuple[nn.Module, list[optim.Optimizer]]:
    """Model and optimizers as they will be: a trial without memory where their structure has to change."""
    now = ranks_of(model)
    for name, p in unwrap(model).named_parameters():
        if p.is_meta:
            raise ValueError(f"{name} is on the meta device; call model.to_empty(device=…) before resume")
    if now == ranks:
        return model, list(optimizers)
    if now or plan is None or not may_change or is_sharded(model):
        raise ValueError(
            f"{path}: the saved model is {_words(ranks)}, this one is {_words(now)}; build it dense and give "
            "switch=, or make it low-rank by pf.reshape_(model, pf.Checkpoint.plan_in(folder)) before it is wrapped"
        )
    names, trial = names_of(model), hollow(model)
    by_name = {own_name(name): p for name, p in unwrap(trial).named_parameters()}
    stand_ins: list[optim.Optimizer] = [
        optim.SGD([{"params": [by_name[name] for name in group]} for group in group_names(optimizer, names)])
        for optimizer in optimizers
    ]
    try:
        fit(unwrap(trial), plan)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    convert(unwrap(trial), plan, stand_ins, by_svd)
    return trial, stand_ins


def restructure_(average: nn.Module, ranks: Ranks, plan: Plan | None) -> None:
    """Give an averaged copy the structure that `expected` found possible."""
    if plan is not None and ranks_of(average) != ranks:
        convert(unwrap(average), plan, None, by_nan)
        Job(average).rewrapped({})


def _words(ranks: Ranks) -> str:
    return f"low-rank in {len(ranks)} layers" if ranks else "dense"
