"""`preview`: the loss of a model at lower ranks, evaluated with copies of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..lowrank.factorize import factorize_
from ..planning.plan import Plan
from ..planning.text import Table
from .switch_settings import Evaluate


def preview(model: nn.Module, evaluate: Evaluate, plans: Iterable[tuple[str, Plan]]) -> Preview:
    """Evaluate the loss with each of several labelled plans, in a copy of the model."""
    rows = []
    for label, plan in plans:
        trial = copy.deepcopy(model)
        with warnings.catch_warnings():  # of factors that keep too little: the loss shows it
            warnings.simplefilter("ignore")
            plan = factorize_(trial, plan)
        rows.append((label, plan, held_out_loss(trial, evaluate)))
    return Preview(held_out_loss(model, evaluate), tuple(rows))


@dataclass(frozen=True)
class Preview:
    """Loss on a held-out batch at full rank and at several lower ranks."""

    before: float
    rows: tuple[tuple[str, Plan, float], ...]  # label, plan with errors, loss

    def __str__(self) -> str:
        table = [["rank", "parameters", "loss", "worst layer", "its error"]]
        dense = self.rows[0][1].before.parameters
        table.append(["full rank", f"{dense:,}", f"{self.before:.4g}", "", ""])
        for rank, plan, loss in self.rows:
            worst = max((e for e in plan if e.error is not None), key=lambda e: e.error or 0, default=None)
            name, error = (worst.name, f"{worst.error:.3f}") if worst else ("none changed", "")
            table.append([rank, f"{plan.after.parameters:,}", f"{loss:.4g}", name, error])
        return str(Table(table, left=(0, 3)))


def held_out_loss(model: nn.Module, evaluate: Evaluate) -> float:
    """Loss in evaluation mode. Training modes and random states are restored."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            return float(evaluate(model))
    finally:
        for module, training in modes.items():
            module.training = training
