"""`preview`: the loss of a model at lower ranks, evaluated with its weights changed temporarily."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.names import named_modules
from ..lowrank.factorize import svd_factors
from ..planning.plan import Entry, Plan
from ..planning.rules import align
from ..planning.table import format_table
from .switch_settings import Evaluate


def held_out_loss(model: nn.Module, evaluate: Evaluate) -> float:
    """Loss in evaluation mode. Training modes and random states are restored."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            return _as_number(evaluate(model))
    finally:
        for module, training in modes.items():
            module.training = training


def _as_number(loss: Any) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise TypeError(
            f"evaluate returned a {type(loss).__name__}{shape}; return the loss of the held-out batch, one number"
        ) from None


class Trial:
    """Context in which weights are replaced by the product of their factors; on exit they are restored bit for bit."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = {name: module for name, _, module in named_modules(model)}
        self.saved: dict[tuple[str, str], Tensor] = {}

    def put(self, e: Entry) -> Entry:
        """Set the weight to its approximation at the entry's rank, or restore it if it has none.

        Returns:
            The entry with its relative error.
        """
        assert e.matrix is not None
        weight = self.layers[e.layer].get_parameter(e.matrix.weight).data
        key, index = (e.layer, e.matrix.weight), e.matrix.index
        if key not in self.saved:
            self.saved[key] = weight.clone()
        own = self.saved[key]
        if e.rank is None:
            weight[index] = own[index]
            return replace(e, error=None)
        down, up, error = svd_factors(e, own)
        weight[index] = e.matrix.from_matrix(e.matrix.product_fp32(down, up)).to(weight.dtype)
        return replace(e, error=error)

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (layer, name), own in self.saved.items():
            self.layers[layer].get_parameter(name).data.copy_(own)


def limit_jump(model: nn.Module, plan: Plan, loss: Callable[[], float], max_jump: float) -> Plan:
    """Raise ranks, or leave layers dense, until the loss rises by at most the share `max_jump`.

    In each round the quarter of the matrices with the largest errors gets twice the rank. A matrix that would not
    become smaller at that rank stays dense.
    """
    plan = plan.replace(replace(e, asked=None) for e in plan)  # from an earlier switch
    limit = max_jump * abs(before := loss()) + before
    with Trial(model) as trial:
        tried = {e.name: trial.put(e) for e in plan if e.rank is not None}
        while any(e.rank for e in tried.values()) and not loss() <= limit:
            changed = sorted((e for e in tried.values() if e.rank), key=lambda e: -(e.error or 0.0))
            for e in changed[: math.ceil(len(changed) / 4)]:
                tried[e.name] = trial.put(_raised(e, plan, max_jump))
    return plan.replace(replace(tried.get(e.name, e), error=None) for e in plan)


def _raised(e: Entry, plan: Plan, max_jump: float) -> Entry:
    assert e.matrix is not None
    assert e.rank is not None
    more = min(2 * e.rank, align(e.matrix.full_rank, e.matrix, plan.multiple, plan.min_saving))
    raised = replace(e, asked=e.asked or e.rank)
    if more > e.rank:
        return raised.with_rank(more)
    return raised.keep_dense(f"the loss would jump by more than {100 * max_jump:.3g}%")


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
        return format_table(table, left=(0, 3))


def preview(model: nn.Module, evaluate: Evaluate, plans: Iterable[tuple[str, Plan]]) -> Preview:
    """Evaluate the loss with each of several labelled plans, whose ranks are known. Changes nothing."""
    before = held_out_loss(model, evaluate)
    rows = []
    for label, plan in plans:
        with Trial(model) as trial:
            errors = {e.name: trial.put(e) for e in plan if e.rank is not None}
            rows.append(
                (label, plan.replace(errors.get(e.name, e) for e in plan), held_out_loss(model, evaluate))
            )
    return Preview(before, tuple(rows))
