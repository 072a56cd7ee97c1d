"""What a switch applies: its settings, the plan that they give, and the ranks at the moment of the switch."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import __version__
from ..distributed.ddp import Job
from ..layers.names import named_modules
from ..lowrank.factors import shared_spectra
from ..planning.plan import LITTLE, Plan, check_is_plan
from ..planning.plan import plan as make_plan
from ..planning.rules import Rule, StableRank, apply_rules
from .moments import Position, RanksSettle, When, counts_steps, moment_text
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
        if not (callable(self.when) or isinstance(self.when, RanksSettle)):
            raise TypeError(f"Switch: when={self.when!r} is not a moment such as pf.AtEpoch(80)")
        if not (self.back is None or callable(self.back)):
            raise TypeError(f"Switch: back={self.back!r} is not a moment such as pf.AtEpoch(80)")

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


def compared_facts(s: SwitchSettings, model: nn.Module, at: Position, switched: bool) -> str:
    """Text of everything that must be equal on all workers."""
    layers = [(name, type(m).__name__) for name, _, m in named_modules(model)]
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    # Measured times may differ between workers; those of rank 0 decide.
    plan = [(e.name, e.shape, "measured" if e.ms else (e.rank, e.rule)) for e in s.plan or ()]
    settings = (
        plan, s.rule, s.keep, moment_text(s.when), moment_text(s.back), s.state, s.lr, s.evaluate is None,
    )  # fmt: skip
    return repr((__version__, at, switched, settings, layers, shapes))


def choose_ranks(
    job: Job, plan: Plan, shared: tuple[tuple[str, ...], ...], automatic: bool
) -> tuple[Plan, str]:
    """The plan with the ranks that its rules give for the weights of this moment, the same on all workers.

    Args:
        shared: linear layers that were called with the same tensor, by groups.
        automatic: whether a plan that saves too little is applied to no layer.

    Returns:
        The plan, and text that says how little it saves, if ranks were chosen here.
    """
    unresolved = job.workers.broadcast_object([e.name for e in plan if e.rule is not None])
    spectra = shared_spectra(job, unresolved) if unresolved else None

    def resolved() -> Any:
        done = plan if spectra is None else apply_rules(plan, spectra)
        return dataclasses.replace(done, shared_inputs=shared or plan.shared_inputs).as_data()

    # Of rank 0, since measured times may differ between workers.
    chosen = Plan.from_data(job.workers.run_on_first(resolved))
    little = _saves_little(chosen) if unresolved else ""
    if little and automatic:
        chosen = chosen.replace(e.keep_dense(little) if e.rank else e for e in chosen)
    return chosen, little


def _saves_little(plan: Plan) -> str:
    """Text that says how little the plan saves; "" if it saves at least a tenth of the gradient bytes or of the time."""
    saved = 1 - plan.after.gradient_bytes / max(plan.before.gradient_bytes, 1)
    speedup = plan.speedup if plan.measured else None
    if not plan.ranks or saved >= LITTLE or (speedup and 1 - 1 / speedup >= LITTLE):
        return ""
    time = f" and {1 - 1 / speedup:.1%} of the time" if speedup else ""
    return f"low rank saves only {saved:.1%} of the gradient bytes{time}"


class SharedInputs:
    """Finds linear layers that one forward pass of the training loop calls, one after the other, with the same tensor."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []  # layers that were called one after the other with one tensor
        self._last: Callable[[], Tensor | None] = _nothing  # a weak reference to the last input
        self._handles: list[Any] = []

    def watch(self, model: nn.Module, plan: Plan) -> None:
        """Register a hook with every linear layer of the plan; each is removed after its first call."""
        self._remove()
        names = {e.layer for e in plan if e.rank or e.rule}
        for name, _, module in named_modules(model):
            if name in names and isinstance(module, nn.Linear):
                self._handles.append(
                    module.register_forward_hook(self._hook(name, len(self._handles), module))
                )

    def _hook(self, name: str, place: int, watched: nn.Module) -> Callable[..., None]:
        watched_id = id(watched)

        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling():
                return  # what follows breaks the compiled graph, and a model that calls it in a loop is never compiled
            if id(module) != watched_id or place >= len(self._handles):
                hooks = module._forward_hooks  # those of a copy of the model
                for key in [key for key, hook in hooks.items() if hook is record]:
                    del hooks[key]
                return
            self._handles[place].remove()
            if args and args[0] is self._last():
                self.groups[-1].append(name)
            else:
                self.groups.append([name])
            self._last = weakref.ref(args[0]) if args and isinstance(args[0], Tensor) else _nothing

        return record

    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Groups of two and more layers; ends the watch."""
        self._remove()
        return tuple(tuple(dict.fromkeys(names)) for names in self.groups if len(set(names)) > 1)

    def _remove(self) -> None:
        self._last = _nothing
        while self._handles:
            self._handles.pop().remove()


def _nothing() -> None:
    """Stand-in for a weak reference whose object is gone."""
