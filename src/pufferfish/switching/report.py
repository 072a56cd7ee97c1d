"""`Report`: the result of a switch: ranks, errors, the loss before and after. `preview`: the loss at lower ranks, of copies."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..lowrank.factorize import factorize_
from ..planning import LITTLE, Entry, Plan, Table, obstacles
from .moments import Position

#: Returns the loss of a model on a held-out batch.
Evaluate = Callable[[nn.Module], float | Tensor]

#: Shares by which the held-out loss may rise: hardly, and as after a quarter of the full rank in a run that goes on.
FINE_RISE, USUAL_RISE = 0.1, 1.0
#: Mean energy kept: hardly a change, and what a quarter of the full rank keeps of weights after a short warm-up.
FINE_ENERGY, USUAL_ENERGY = 0.9, 0.4


@dataclass(frozen=True)
class Report:
    """Result of a switch. `str` gives a summary that ends with a `verdict`."""

    plan: Plan  # with ranks and errors
    position: Position
    loss: tuple[float, float] | None = None  # of `evaluate`, before and after
    merged: Position | None = None  # position at which the model became full-rank again
    #: Whether the ranks had settled, or `latest` was reached; None without `RanksSettle`.
    settled: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """Numbers and text, for `Switch.state_dict`."""
        return {
            "plan": self.plan.to_json(),
            "switched": {"at": vars(self.position), "loss": self.loss, "settled": self.settled},
            "merged": self.merged and vars(self.merged),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report | None:
        """The report in the state of a `Switch`; None if it had not yet switched."""
        if (switched := data["switched"]) is None:
            return None
        loss = tuple(switched["loss"]) if switched["loss"] else None
        merged = data["merged"] and Position(**data["merged"])
        plan = Plan.from_json(data["plan"])
        return Report(plan, Position(**switched["at"]), loss, merged, switched["settled"])

    @property
    def energy(self) -> dict[str, float]:
        """Share of ‖W‖² that each factorized matrix has kept: 1 − error²."""
        return {e.name: 1 - e.error**2 for e in self.plan if e.error is not None}

    @property
    def worst(self) -> list[Entry]:
        """The five matrices with the largest error."""
        changed = [e for e in self.plan if e.error is not None]
        return sorted(changed, key=lambda e: -(e.error or 0.0))[:5]

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers for a logger: the switch, or the return to full rank once that has happened.

        >>> import torch, pufferfish as pf
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> switch = pf.Switch(rank=0.25, when=pf.AtEpoch(0), evaluate=lambda model: 2.0)
        >>> if switch.step(model, None, epoch=0):
        ...     for name, value in switch.report.metrics.items():  # wandb.log(switch.report.metrics)
        ...         print(name, value)
        pufferfish/parameters_before 4160
        pufferfish/parameters_after 2112
        pufferfish/energy_kept 0.6
        pufferfish/energy_kept_worst 0.6
        pufferfish/loss_before 2.0
        pufferfish/loss_after 2.0
        """
        dense, low_rank = self.plan.before.parameters, self.plan.after.parameters
        if self.merged is not None:
            return {"pufferfish/parameters_before": low_rank, "pufferfish/parameters_after": dense}
        metrics: dict[str, float] = {
            "pufferfish/parameters_before": dense,
            "pufferfish/parameters_after": low_rank,
        }
        if kept := self.energy.values():
            metrics |= {
                "pufferfish/energy_kept": sum(kept) / len(kept),
                "pufferfish/energy_kept_worst": min(kept),
            }
        if self.loss is not None:
            metrics |= {"pufferfish/loss_before": self.loss[0], "pufferfish/loss_after": self.loss[1]}
        return metrics

    def __str__(self) -> str:
        b, a = self.plan.before, self.plan.after
        why = {
            None: "",
            True: ", as the ranks had settled",
            False: ", the latest moment; ranks had not settled",
        }
        at = f"{self.position}{why[self.settled]}"
        first = f"Switched to low rank at {at}: {b.parameters:,} → {a.parameters:,} parameters"
        back = "" if self.merged is None else f"; merged back to full rank at {self.merged}"
        if not self.plan.ranks:
            first = f"The switch at {self.position} changed no layer: {b.parameters:,} parameters"
        lines = [first + back]
        if self.plan.changed < LITTLE:
            lines.append(obstacles(self.plan))
        if self.loss is not None:
            lines.append("held-out loss: {:.4g} → {:.4g}".format(*self.loss))
        if lowered := [e for e in self.plan if e.asked and e.matrix]:
            kept = sum(e.matrix.factor_numel(e.asked or 0) for e in lowered if e.matrix)
            share = kept / sum(e.before for e in lowered)
            lines.append(f"ranks lowered: stable ranks would keep {share:.0%} of the weights of these layers")
        if self.worst:
            rows = [["worst layers", "rank", "energy kept", "relative error"]]
            rows += [
                [e.name, str(e.rank), f"{self.energy[e.name]:.1%}", f"{e.error:.3f}"] for e in self.worst
            ]
            lines.append(str(Table(rows, left=(0,))))
        return "\n".join([*lines, f"verdict: {self.verdict}"] if self.verdict else lines)

    @property
    def verdict(self) -> str:
        """Whether the switch has lost too much, in words; "" if no layer was changed, or all are full-rank again.

        The loss decides, where `evaluate=` has measured it: a rise by up to 10 % is fine, one by up to 100 % is
        usual. Energy, the share of ‖W‖² that is kept, is a weaker sign: from 90 % on average it is fine, from 40 % usual.

        >>> import torch, pufferfish as pf
        >>> model, losses = torch.nn.Sequential(torch.nn.Linear(64, 64)), iter([1.0, 1.8])
        >>> switch = pf.Switch(rank=0.25, when=pf.AtEpoch(0), evaluate=lambda model: next(losses))
        >>> if switch.step(model, None, epoch=0):
        ...     print(switch.report.verdict)
        usual. The held-out loss rises by 80%; look again after two epochs.
        """
        kept = [*self.energy.values()]
        if not kept or self.merged is not None:
            return ""
        remedy = "raise the rank, leave the worst layers dense, or switch later"
        if self.loss is not None:
            before, after = self.loss
            rise = (after - before) / abs(before) if before else after * math.inf if after else 0.0
            if not math.isfinite(after):
                return f"failed. The held-out loss is {after} after the switch; {remedy}."
            if rise <= FINE_RISE:
                how = f"rises by {rise:.0%}" if rise >= 0.005 else "does not rise"
                return f"fine. The held-out loss {how}."
            if rise <= USUAL_RISE:
                return f"usual. The held-out loss rises by {rise:.0%}; look again after two epochs."
            return (
                f"large. The held-out loss rises from {before:.4g} to {after:.4g}. If two epochs do not make that up, "
                f"{remedy}."
            )
        mean = sum(kept) / len(kept)
        text = f"{mean:.0%} of the energy is kept on average"
        if mean >= FINE_ENERGY:
            return f"fine. {text}."
        if mean >= USUAL_ENERGY:
            return f"usual. {text}; pass evaluate= to see the loss."
        return f"low. {text}. Pass evaluate= to see the loss; if two epochs do not make it up, {remedy}."


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


def saves_little(plan: Plan) -> str:
    """Text that says how little the plan saves; "" if it saves at least a tenth of the gradient bytes or of the time."""
    saved = 1 - plan.after.gradient_bytes / max(plan.before.gradient_bytes, 1)
    speedup = plan.speedup if plan.measured else None
    if not plan.ranks or saved >= LITTLE or (speedup and 1 - 1 / speedup >= LITTLE):
        return ""
    time = f" and {1 - 1 / speedup:.1%} of the time" if speedup else ""
    return f"low rank saves only {saved:.1%} of the gradient bytes{time}"
