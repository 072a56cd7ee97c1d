"""What low rank would do to the loss, tried on the dense model's own weights and taken back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor, nn

from ..layers.names import named_modules
from ..lowrank.factorize import by_svd
from ..optim.factor_map import multiplied
from ..planning.plan import Entry, Plan
from ..planning.rules import align
from ..planning.table import aligned

#: The loss of a model on a held batch.
Evaluate = Callable[[nn.Module], float | Tensor]


def held_loss(model: nn.Module, evaluate: Evaluate) -> float:
    """The loss in evaluation mode; modes and random numbers are as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            return float(evaluate(model))
    finally:
        for module, training in modes.items():
            module.training = training


class Trial:
    """Weights replaced by what their factors would multiply to, and put back at the end, bit for bit."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = {name: module for name, _, module in named_modules(model)}
        self.kept: dict[tuple[str, str], Tensor] = {}

    def put(self, e: Entry) -> Entry:
        """The weight at the entry's rank, or itself where it has none; the entry with its error."""
        assert e.matrix is not None
        weight = self.layers[e.layer].get_parameter(e.matrix.weight).data
        key, rows = (e.layer, e.matrix.weight), e.matrix.rows
        if key not in self.kept:
            self.kept[key] = weight.clone()
        own = self.kept[key]
        if e.rank is None:
            weight[rows] = own[rows]
            return replace(e, error=None)
        down, up, error = by_svd(e, own)
        weight[rows] = e.matrix.roll(multiplied(e.matrix, down, up)).to(weight.dtype)
        return replace(e, error=error)

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (layer, name), own in self.kept.items():
            self.layers[layer].get_parameter(name).data.copy_(own)


def softened(model: nn.Module, plan: Plan, loss: Callable[[], float], max_jump: float) -> Plan:
    """The plan with ranks raised, or layers left dense, until the loss jumps by no more than `max_jump`.

    Round by round the quarter of the layers that lost most gets twice the rank; one whose rank cannot be
    doubled and still save stays dense.
    """
    plan = plan.replace(replace(e, asked=None) for e in plan)  # of an earlier switch
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
    noted = replace(e, asked=e.asked or e.rank)
    if more > e.rank:
        return noted.ranked(more)
    return noted.stays(f"the loss would jump by more than {max_jump:.0%}")


@dataclass(frozen=True)
class Preview:
    """The loss on a held batch as it is, and at several ranks."""

    before: float
    rows: tuple[tuple[str, Plan, float], ...]  # what was asked, the plan with errors, the loss

    def __str__(self) -> str:
        table = [["rank", "parameters", "loss", "worst layer", "its error"]]
        dense = self.rows[0][1].before.parameters
        table.append(["as it is", f"{dense:,}", f"{self.before:.4g}", "", ""])
        for rank, plan, loss in self.rows:
            worst = max((e for e in plan if e.error is not None), key=lambda e: e.error or 0, default=None)
            name, error = (worst.name, f"{worst.error:.3f}") if worst else ("none changed", "")
            table.append([rank, f"{plan.after.parameters:,}", f"{loss:.4g}", name, error])
        return aligned(table, left=(0, 3))


def preview(model: nn.Module, evaluate: Evaluate, plans: Iterable[tuple[str, Plan]]) -> Preview:
    """Try resolved plans one after the other."""
    before = held_loss(model, evaluate)
    rows = []
    for asked, plan in plans:
        with Trial(model) as trial:
            errors = {e.name: trial.put(e) for e in plan if e.rank is not None}
            rows.append(
                (asked, plan.replace(errors.get(e.name, e) for e in plan), held_loss(model, evaluate))
            )
    return Preview(before, tuple(rows))
