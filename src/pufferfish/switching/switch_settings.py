"""`SwitchSettings`: the arguments of a `Switch`, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from ..planning.plan import Plan, check_is_plan
from ..planning.planner import plan as make_plan
from ..planning.rules import Rule, StableRank
from .moments import RanksSettle, When, counts_steps
from .report import Evaluate

#: Share of their weights that the matrices of an automatic switch keep at most. A small GPT trained with Muon on enwik8 loses
#: 0.02 bits at 92 % of the weights of its blocks, 0.07 at 62 % and 0.14 at 48 %.
AT_MOST = 0.6


@dataclass(frozen=True, kw_only=True)
class SwitchSettings:
    """Arguments of a `Switch`, which documents them."""

    plan: Plan | None = None
    rule: Rule | None = None
    keep: tuple[str, ...] = ()
    when: When | RanksSettle = field(default_factory=RanksSettle)
    back: When | None = None
    state: Literal["project", "reset"] = "project"
    lr: float = 1.0
    evaluate: Evaluate | None = None

    def __post_init__(self) -> None:
        if self.plan is not None:
            check_is_plan(self.plan, "Switch")
        if self.plan is not None and (self.rule is not None or self.keep):
            raise ValueError("Switch: rank= and keep= have no effect with a plan; pass them to pf.plan")
        if self.state not in ("project", "reset"):
            raise ValueError(f'Switch: state={self.state!r} is neither "project" nor "reset"')
        for name, moment in (("when", self.when), ("back", self.back)):
            if not (
                moment is None or callable(moment) or (name == "when" and isinstance(moment, RanksSettle))
            ):
                raise TypeError(f"Switch: {name}={moment!r} is not a moment such as pf.AtEpoch(80)")

    @property
    def by(self) -> Literal["epoch", "step"]:
        """Unit in which an adapter counts by default. By epochs, a run of one epoch would never reach `RanksSettle`."""
        moments = (self.when,) if self.back is None else (self.when, self.back)
        return "step" if all(map(counts_steps, moments)) else "epoch"

    @property
    def automatic(self) -> bool:
        """Whether ranks are scaled stable ranks, which need the initial spectra."""
        return self.plan is None and self.rule is None

    def make_plan(self, model: nn.Module, initial: Mapping[str, list[float]] | None) -> Plan:
        """The plan for a model, with unresolved rank rules. `initial` are its initial spectra by entry name."""
        if self.plan is not None:
            return self.plan
        if self.rule is not None:
            return make_plan(model, self.rule, keep=self.keep)
        plan = make_plan(model, StableRank(at_most=AT_MOST), keep=self.keep)
        if not initial:
            return plan
        spectra = {name: torch.tensor(s, dtype=torch.float64) for name, s in initial.items()}
        missing = {e.name for e in plan if e.rule is not None and e.name not in spectra}
        rule = StableRank(dict.fromkeys(missing, 0.0) | spectra, at_most=AT_MOST)
        plan = make_plan(model, rule, keep=self.keep)
        reason = "frozen at the first call of the switch"
        return plan.replace(e.keep_dense(reason) if e.name in missing else e for e in plan)
