"""`Decision`: when a switch changes the model and with which plan, the same on all workers."""

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.ddp import Job
from ..layers.names import named_modules
from ..lowrank.checks import (
    check_not_inference,
    check_optimizers_complete,
    check_plan,
    check_structure,
    check_wrapper_passed,
    factorized_weights,
    find_compiled,
)
from ..optim.carry import check_optimizers, warn_of_reset, warn_of_stacks
from ..planning.plan import LITTLE, Plan
from ..planning.planner import apply_rules
from ..planning.rules import stable_rank
from .averages import averaged_model
from .moments import Position, RanksSettle, known_in_advance, moment_text
from .report import held_out_loss
from .switch_settings import SwitchSettings


class Decision:
    """Decides when a switch changes the model, and with which plan.

    The plan is made at the first call, when all workers compare their settings and models. It is applied at the
    switch, after its rank rules have been resolved with the weights of that moment.
    """

    def __init__(self, settings: SwitchSettings) -> None:
        self.settings = settings
        self.initial: dict[str, list[float]] | None = None  # spectra at the first call
        self.history: list[dict[str, float]] = []  # stable ranks observed since then
        self._automatic = settings.automatic
        self._plan: Plan | None = None
        self._started = False
        self._warned = False  # that the plan changes little
        self._past = False  # warned of a position after the end of the run
        self._observed: int | None = None  # epoch, or step, of the last observation
        self.inputs = _Inputs()

    def state(self) -> dict[str, Any]:
        """State for `load`."""
        inputs = [list(names) for names in self.inputs.groups]
        return {
            "initial": self.initial,
            "history": self.history,
            "observed": self._observed,
            "inputs": inputs,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; the next call is a first call again."""
        self.initial, self.history = state["initial"], state["history"]
        self._observed = state["observed"]  # inside an epoch, its start is not observed again
        self.inputs.groups = state["inputs"]  # the resumed run multiplies the same layers together
        self._plan, self._started = None, False

    def not_due(self, at: Position, switched: bool) -> bool:
        """Whether there is nothing to do at this position, known without the model and the other workers."""
        moment = self.settings.back if switched else self.settings.when
        return self._started and known_in_advance(moment) and not any(self._of_this_worker(at, switched))

    def due(
        self,
        job: Job,
        at: Position,
        switched: bool,
        optimizers: list[Optimizer],
        averages: Iterable[nn.Module],
    ) -> bool:
        """Whether to change the model now: the decision of rank 0, after a check that all workers agree."""
        decision = self._of_this_worker(at, switched)
        about = "position, settings, pufferfish version or model (names, types, shapes); make the same call on all workers"
        facts = self._facts(job.inner, at, switched) if job.workers.size > 1 else ""
        observe, now = divmod(job.workers.agree(facts, 2 * decision[0] + decision[1], about), 2)
        if not self._started:
            job.warn_without_group()
            if not switched:
                if job.workers.rank == 0:
                    self._warn_without_total(at)
                self._plan = job.workers.run_on_all(
                    lambda: self._start(job, at, optimizers, averages, not now)
                )
                if job.workers.rank == 0:
                    self._warned = self._plan.warn_if_little_changes(stacklevel=3)
                    weights = factorized_weights(job.inner, self._plan)
                    warn_of_stacks(optimizers, weights, stacklevel=3)
                    if self.settings.state == "project" and not now:
                        warn_of_reset(optimizers, weights, stacklevel=3)
            self._started = True
        return (bool(observe) and self._observe(job, at)) or bool(now)

    def prepare(
        self, job: Job, optimizers: list[Optimizer], averages: Iterable[nn.Module]
    ) -> tuple[Plan, float | None]:
        """Check on all workers everything that can fail, and choose the ranks. Changes nothing but what `Job.checked` repairs.

        Args:
            averages: averaged copies of the model, which will be changed too.

        Returns:
            The plan with all ranks, the same on all workers, and the held-out loss before the switch. An automatic plan has
            no ranks if the change would save too little.
        """
        plan = job.checked(lambda: self._checked_plan(job, optimizers, averages))
        shared = self.inputs.shared() or plan.shared_inputs
        unresolved = job.workers.broadcast_object([e.name for e in plan if e.rule is not None])
        spectra = job.spectra(unresolved) if unresolved else None

        def resolved() -> Any:
            done = plan if spectra is None else apply_rules(plan, spectra)
            return dataclasses.replace(done, shared_inputs=shared).as_data()

        # Of rank 0, since measured times may differ between workers.
        plan = Plan.from_data(job.workers.run_on_first(resolved))
        little = _saves_little(plan) if unresolved else ""
        if little and self._automatic:
            plan = plan.replace(e.keep_dense(little) if e.rank else e for e in plan)
        if job.workers.rank == 0 and not self._warned:  # ranks or times may leave more layers dense
            self._warned = plan.warn_if_little_changes(stacklevel=3)
            if little and not self._warned:  # ranks that the user asked for are applied
                warnings.warn(f"Switch: {little}; pass lower ranks", stacklevel=3)
        return plan, self.loss(job)

    def loss(self, job: Job) -> float | None:
        """Held-out loss of rank 0, on all workers. All of them evaluate, in case `evaluate` calls collectives.

        An error on one worker is raised on all.
        """
        evaluate = self.settings.evaluate
        if evaluate is None:
            return None
        return job.workers.gather(lambda: held_out_loss(job.inner, evaluate))[0]

    def _of_this_worker(self, at: Position, switched: bool) -> tuple[bool, bool]:
        """Whether this worker would compute spectra, and whether it would change the model."""
        when, back = self.settings.when, self.settings.back
        if switched:
            return False, back is not None and bool(back(at))
        if isinstance(when, RanksSettle):
            observe = when.due(at) and at.unit != self._observed
            return observe, when.overdue(at) or when.settled(self.history)
        return self._automatic and self.initial is None, bool(when(at))

    def warn_past_total(self, at: Position) -> None:
        """Warn once if the run is longer than `total`, as when it counts epochs and the loop passes steps."""
        if self._past or not at.total or at.unit is None or at.unit <= at.total:
            return
        self._past = True
        unit = "epoch" if at.epoch is not None else "step"
        warnings.warn(
            f"Switch: switch.step got {unit}={at.unit} of total={at.total}; pass the length of the run in {unit}s as total=, "
            "or the switch happens too early",
            stacklevel=3,
        )

    def _warn_without_total(self, at: Position) -> None:
        when = self.settings.when
        if isinstance(when, RanksSettle) and when.latest is None and at.total is None:
            warnings.warn(
                f"Switch: switch.step got no total=, so the switch happens when the ranks settle, after more than {when.span} "
                "observations, or never; with total= it happens at a third of the run at the latest",
                stacklevel=4,
            )

    def _facts(self, model: nn.Module, at: Position, switched: bool) -> str:
        """Text of everything that must be equal on all workers."""
        from .. import __version__

        s = self.settings
        layers = [(name, type(m).__name__) for name, _, m in named_modules(model)]
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        # Measured times may differ between workers; those of rank 0 decide.
        plan = [(e.name, e.shape, "measured" if e.ms else (e.rank, e.rule)) for e in s.plan or ()]
        settings = (
            plan, s.rule, s.keep, moment_text(s.when), moment_text(s.back), s.state, s.lr, s.evaluate is None,
        )  # fmt: skip
        return repr((__version__, at, switched, settings, layers, shapes))

    def _start(
        self,
        job: Job,
        at: Position,
        optimizers: list[Optimizer],
        averages: Iterable[nn.Module],
        later: bool,
    ) -> Plan:
        """Make the plan, and raise before the warm-up for what would fail after it.

        Args:
            later: whether there is a warm-up.
        """
        check_optimizers(optimizers, later)
        self.check(job, optimizers)
        if known_in_advance(back := self.settings.back) and back is not None:
            back(at)  # raises if the loop does not pass what it needs
        plan = self.settings.make_plan(job.dense, self.initial)
        check_structure(job.dense, plan)
        for average in averages:
            try:
                check_structure(averaged_model(average, job.inner), plan)
            except ValueError as error:
                raise ValueError(
                    f"also: {type(average).__name__} is not a copy of the model: {error}; pass the module that has the same layers"
                ) from None
        check_wrapper_passed(factorized_weights(job.dense, plan), job.ddp)
        if not plan.shared_inputs and not self.inputs.groups and find_compiled(job.model) is None:
            self.inputs.watch(job.inner, plan)
        return plan

    def _checked_plan(self, job: Job, optimizers: list[Optimizer], averages: Iterable[nn.Module]) -> Plan:
        self.check(job, optimizers)
        assert self._plan is not None
        check_plan(job.dense, self._plan, finite=not job.sharded)
        for average in averages:
            check_plan(averaged_model(average, job.inner), self._plan, finite=True)
        check_optimizers_complete(job.inner, self._plan, optimizers)
        check_wrapper_passed(factorized_weights(job.inner, self._plan), job.ddp)
        return self._plan

    def check(self, job: Job, optimizers: list[Optimizer]) -> None:
        """Raise an error if the layers of the model cannot be replaced here."""
        check_not_inference(job.workers.caller)
        check_optimizers(optimizers)
        job.check_rewrap()

    def _observe(self, job: Job, at: Position) -> bool:
        """Compute the spectra. Returns whether the ranks have settled, for `RanksSettle`."""
        spectra = job.spectra()
        self._observed = at.unit
        if self.initial is None:
            self.initial = {name: values.tolist() for name, values in spectra.items()}
            if self._automatic:
                self._plan = self.settings.make_plan(job.dense, self.initial)
        if not isinstance(self.settings.when, RanksSettle):
            return False
        self.history.append({name: stable_rank(values) for name, values in spectra.items()})
        return self.settings.when.settled(self.history)


class _Inputs:
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


def _saves_little(plan: Plan) -> str:
    """Text that says how little the plan saves; "" if it saves at least a tenth of the gradient bytes or of the time."""
    saved = 1 - plan.after.gradient_bytes / max(plan.before.gradient_bytes, 1)
    speedup = plan.speedup if plan.measured else None
    if not plan.ranks or saved >= LITTLE or (speedup and 1 - 1 / speedup >= LITTLE):
        return ""
    time = f" and {1 - 1 / speedup:.1%} of the time" if speedup else ""
    return f"low rank saves only {saved:.1%} of the gradient bytes{time}"
