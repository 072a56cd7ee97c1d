"""`Switch`: ends the full-rank warm-up and makes the model low-rank inside a running training loop."""

import dataclasses
import json
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import __version__
from ..distributed.ddp import Job, check_rewrap, find_ddp
from ..layers import named_modules, unwrap
from ..lowrank.factorize import check_change, check_not_inference, check_plan, find_compiled, ranks_of
from ..lowrank.factors import (
    averaged_model,
    in_basis_of,
    nan_factors,
    shared_factors,
    shared_ranks,
    shared_spectra,
)
from ..lowrank.optimizers import (
    Optimizers,
    as_list,
    check_optimizers,
    check_wrapper_passed,
    factorized_weights,
    warn_of_reset,
)
from ..lowrank.rewrite import Rewrite, commit
from ..planning import Plan, RankLike, StableRank, as_patterns, as_rule, check_is_plan, stable_rank
from ..planning import plan as make_plan
from .fsdp2 import ShardedJob, rebuild
from .moments import Position, RanksSettle, When, counts_steps, known_in_advance, moment_text
from .report import Evaluate, Preview, Report, held_out_loss, preview, saves_little
from .scaled_rate import ScaledRate

#: Share of their weights that the matrices of an automatic switch keep at most. A small GPT trained with Muon on enwik8 loses
#: 0.02 bits at 92 % of the weights of its blocks, 0.07 at 62 % and 0.14 at 48 %.
AT_MOST = 0.6
OptimizersT = TypeVar("OptimizersT", bound=Optimizers)


class Switch:
    """Full-rank warm-up, then the switch to low rank, inside your own training loop.

    Args:
        plan: Layers and ranks. Rank rules in the plan are resolved at the switch. `embed`, `only` and `overrides` are
            options of `pufferfish.plan`: `pf.Switch(pf.plan(model, embed=64))`.
        rank: Instead of a plan, a rank or rule for all layers. With neither, scaled stable ranks are used: the
            initial spectra are computed at the first call of `step`, so call it before the first update. If these
            ranks would keep more than 60 % of the weights, as after Muon, each matrix keeps 60 % of its own weights. The
            model stays dense, with a warning, if less than a tenth of the bytes would be saved.
        keep: With `rank`, name patterns of layers that stay dense.
        when: `AtEpoch(n)`, `AtStep(n)`, `AtFraction(share)`, `RanksSettle()` (the default: with `total=`, at a third
            of the run at the latest) or any function of a `Position`.
        back: Moment at which the model becomes dense again, for a full-rank finish.
        state: "project" carries the optimizer's moments over to the factors, "reset" drops them.
        lr: Factor for the schedule's learning rate after the switch.
        evaluate: Returns the loss of the inner model on a held-out batch. It is called in evaluation mode on every
            worker before and after the switch, and the report has the values of rank 0.

    >>> import torch, pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> switch = pf.Switch(rank=0.25, when=pf.AtEpoch(2))
    >>> [switch.step(model, optimizer, epoch=epoch) for epoch in range(4)]
    [False, False, True, False]
    >>> switch.report.plan.ranks
    {'0': {'': 16}}
    >>> switch
    <Switch: ratio 0.25, when=AtEpoch(n=2); low rank since epoch 2>
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        rank: RankLike | None = None,
        keep: Iterable[str] = (),
        when: When | RanksSettle | None = None,
        back: When | None = None,
        state: Literal["project", "reset"] = "project",
        lr: float = 1.0,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.keep = as_patterns("keep", keep)
        if plan is not None:
            check_is_plan(plan, "Switch")
            if rank is not None or self.keep:
                raise ValueError("Switch: rank= and keep= have no effect with a plan; pass them to pf.plan")
        if state not in ("project", "reset"):
            raise ValueError(f'Switch: state={state!r} is neither "project" nor "reset"')
        if not (when is None or callable(when) or isinstance(when, RanksSettle)):
            raise TypeError(f"Switch: when={when!r} is not a moment such as pf.AtEpoch(80)")
        if not (back is None or callable(back)):
            raise TypeError(f"Switch: back={back!r} is not a moment such as pf.AtEpoch(80)")
        self.plan = plan
        self.rule = None if rank is None else as_rule(rank)
        self.when = RanksSettle() if when is None else when
        self.back = back
        self.state = state
        self.lr = lr
        self.evaluate = evaluate
        self.report: Report | None = None
        #: Spectra at the first call by entry name, if they were needed.
        self.initial: dict[str, list[float]] | None = None
        #: Stable ranks by entry name, one mapping for each observation by `RanksSettle`.
        self.history: list[dict[str, float]] = []
        self._plan: Plan | None = None  # of the first call, with unresolved rank rules
        #: What all workers must have set, and whether `when`, and `back`, need no other worker to know that they are not due.
        self._settings = (
            self.rule,
            self.keep,
            moment_text(self.when),
            moment_text(back),
            state,
            lr,
            evaluate is None,
        )
        self._decides_alone = known_in_advance(self.when), known_in_advance(back)
        self._started = False  # whether the workers have compared their settings and models
        self._observed: int | None = None  # epoch, or step, of the last observation
        self._inputs = SharedInputs()
        self._rates: list[ScaledRate] = []
        self._warned = False  # that the plan changes little
        self._past = False  # warned of a position after the end of the run

    @property
    def by(self) -> Literal["epoch", "step"]:
        """Unit in which an adapter counts by default. By epochs, a run of one epoch would never reach `RanksSettle`."""
        moments = (self.when,) if self.back is None else (self.when, self.back)
        return "step" if all(map(counts_steps, moments)) else "epoch"

    @property
    def low_rank(self) -> bool:
        """Whether the model is low-rank now: after a switch that did not leave it dense, and before `back`."""
        return self.report is not None and bool(self.report.plan.ranks) and self.merged is None

    @property
    def merged(self) -> Position | None:
        """Position at which the model became full-rank again, or None."""
        return None if self.report is None else self.report.merged

    def __repr__(self) -> str:
        rank = "as planned" if self.plan else self.rule or StableRank()
        at = self.report and self.report.position
        status = f"low rank since {at}" if self.low_rank else "stays dense" if at else "not yet switched"
        if self.merged is not None:
            status = f"full rank again since {self.merged}"
        return f"<Switch: {rank}, when={moment_text(self.when)}; {status}>"

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        epoch: int | None = None,
        step: int | None = None,
        total: int | None = None,
        also: Iterable[nn.Module] = (),
        group: dist.ProcessGroup | None = None,
    ) -> bool:
        """Switch the model if it is time. Call it at the start of every epoch (or step), on every worker.

        Call it between updates: gradients of the parameters that it replaces are dropped.
        The first call and the one that switches communicate between the workers. Other calls
        communicate only if the moment is your own function, or when `RanksSettle` observes the ranks.

        Args:
            model: Plain, DDP or compiled. It is changed in place.
            optimizer: One or several, changed in place. Pass every optimizer of the model.
            total: Length of the run in epochs, or in steps if `epoch` is not given.
            also: Averaged copies of the model (EMA, SWA), which become low-rank in the same basis.
            group: Process group of the workers that train this model without DDP, averaging gradients themselves; pass it
                in every call. Then all is done as under DDP: settings are compared, each SVD is computed once and
                broadcast, and parameters that differ get the values of the first worker, with a warning. Optimizer state
                stays each worker's own and is not compared; where a loop shards it by hand, use `state="reset"`, since
                a factor may belong to another worker than its weight did.

        Returns:
            True if the model was changed by this call.
        """
        at = Position(epoch=epoch, step=step, total=total)
        self._warn_past_total(at)
        also = list(also)
        self._scale_rates(optimizer)
        if self._skips(at):
            return False
        job = Job(model, "switch.step", group)
        if not self._due(job, at, optimizer, also):
            return False
        if self.report is not None:
            self._merge(job, at, optimizer, also)
            return True
        report, loss = self._prepare(job, at, optimizer, also)
        if report.plan.ranks:
            plan, changes = self._factorized(job, report.plan, optimizer, also)
            report = dataclasses.replace(report, plan=plan)
            changes[0].carrier.warn_of_resets(stacklevel=3)
            commit(changes, job.workers, [job.ddp, *map(find_ddp, also)], [(self, "report", report)])
        else:
            self.report = report
        self._scale_rates(optimizer)
        if loss is not None:  # last: an error in it must not hide that the model has changed
            self.report = dataclasses.replace(report, loss=(loss, self._loss(job)))
        return bool(report.plan.ranks)

    def rebuild(
        self,
        model: nn.Module,
        optimizer: OptimizersT,
        *,
        build: Callable[[], nn.Module],
        shard: Callable[[nn.Module], nn.Module | None],
        epoch: int | None = None,
        step: int | None = None,
        total: int | None = None,
    ) -> tuple[nn.Module, OptimizersT]:
        """`step` for FSDP2, whose shards cannot be changed in place: build a new model and fill it layer by layer.

        Args:
            build: Builds the dense model, as at the start. It is called on the meta device.
            shard: Applies `fully_shard` to it, as at the start.

        Returns:
            The model and the optimizer to use from now on; before the switch, those that were passed. The optimizer
            is always the same object, so that schedulers stay attached.
        """
        at = Position(epoch=epoch, step=step, total=total)
        self._warn_past_total(at)
        self._scale_rates(optimizer)
        if self.report is not None:
            return model, optimizer
        if self.back is not None:
            raise ValueError("switch.rebuild: back= is not supported for sharded models")
        if self._skips(at):
            return model, optimizer
        job = ShardedJob(model, build)
        if self._due(job, at, optimizer, []):
            report, loss = self._prepare(job, at, optimizer, [])
            if report.plan.ranks:
                model, plan = rebuild(
                    model, optimizer, report.plan, build=build, shard=shard, carry=self.state == "project",
                    workers=job.workers,
                )  # fmt: skip
                report = dataclasses.replace(report, plan=plan)
            self.report = report
            self._scale_rates(optimizer)
            if loss is not None:
                after = self._loss(Job(model, "switch.rebuild"))
                self.report = dataclasses.replace(report, loss=(loss, after))
        return model, optimizer

    def due(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        epoch: int | None = None,
        step: int | None = None,
        total: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> bool:
        """Whether `step` would change the model at this position. Call it on every worker, like `step`.

        It is the first half of `step`, not a mere question: the workers exchange messages, and the first call starts the
        switch, which plans, measures and warns.

        Args:
            optimizer: Checked at the first call, as by `step`.
        """
        at = Position(epoch=epoch, step=step, total=total)
        if self._skips(at):
            return False
        return self._due(Job(model, "switch.due", group), at, optimizer, [])

    def preview(
        self, model: nn.Module, evaluate: Evaluate, ranks: Iterable[RankLike] | None = None
    ) -> Preview:
        """Compute the loss on a held-out batch after a switch, at the ranks of this switch or at others.

        Each is tried on a copy of the model: `evaluate` must use the model that it is passed.

        >>> import torch, pufferfish as pf
        >>> model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
        >>> table = pf.Switch(rank=0.25).preview(model, lambda m: m(x).square().mean(), ranks=[0.1, 0.4])
        >>> [(label, plan["0"].rank) for label, plan, loss in table.rows]
        [('ratio 0.1', 16), ('ratio 0.4', 16)]
        """
        inner = unwrap(model)
        if ranks is None:
            plans = [("this switch", self._make_plan(inner))]
        else:
            plans = [(str(as_rule(r)), make_plan(inner, r, keep=self.keep)) for r in ranks]
        return preview(inner, evaluate, plans)

    def _warn_past_total(self, at: Position) -> None:
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

    def _scale_rates(self, optimizer: Optimizers) -> None:
        """After the switch, scale the learning rates of the optimizers by `lr`, once."""
        if self.report and self.report.plan.ranks and self.lr != 1.0 and not self._rates:
            self._rates = [ScaledRate(one, self.lr) for one in as_list(optimizer)]

    def _skips(self, at: Position) -> bool:
        """Whether there is nothing to do at this position, known without the model and the other workers."""
        if self.report is not None and (self.back is None or not self.low_rank):
            return True
        alone = self._decides_alone[self.report is not None]
        return self._started and alone and not any(self._wishes(at))

    def _wishes(self, at: Position) -> tuple[bool, bool]:
        """Whether this worker would compute spectra, and whether it would change the model."""
        when, back = self.when, self.back
        if self.report is not None:
            return False, back is not None and bool(back(at))
        if isinstance(when, RanksSettle):
            observe = when.due(at) and at.unit != self._observed
            return observe, when.overdue(at) or when.settled(self.history)
        return self._automatic and self.initial is None, bool(when(at))

    def _due(self, job: Job, at: Position, optimizer: Optimizers, also: list[nn.Module]) -> bool:
        """Whether to change the model now: the decision of rank 0, after a check that all workers agree."""
        if job.sharded and not isinstance(job, ShardedJob):
            raise ValueError("switch.step cannot change FSDP2 shards in place; call switch.rebuild")
        observe, now = self._wishes(at)
        if job.workers.size > 1:
            # Measured times may differ between workers; those of rank 0 decide.
            plan = [(e.name, e.shape, "measured" if e.ms else (e.rank, e.rule)) for e in self.plan or ()]
            facts = repr((__version__, at, self.report is not None, plan, self._settings, job.facts))
            about = "position, settings, pufferfish version or model (names, types, shapes); make the same call on all workers"
            decision = job.workers.agree(facts, 2 * observe + now, about)
            observe, now = decision >= 2, decision % 2 == 1
        if not self._started:
            self._start(job, at, optimizer, also, later=not now)
        return (observe and self._observe(job, at)) or now

    def _start(
        self, job: Job, at: Position, optimizer: Optimizers, also: list[nn.Module], later: bool
    ) -> None:
        """The first call, and the first of a resumed run: plan, and warn and raise for what would fail after the warm-up.

        Args:
            later: whether there is a warm-up.
        """
        job.warn_without_group()
        if self.report is None:
            warns, when = job.workers.rank == 0, self.when
            if warns and isinstance(when, RanksSettle) and when.latest is None and at.total is None:
                warnings.warn(
                    "Switch: switch.step got no total=, so the switch happens when the ranks settle, after more than "
                    f"{when.span} observations, or never; with total= it happens at a third of the run at the latest",
                    stacklevel=4,
                )
            self._plan = job.workers.run_on_all(lambda: self._first_plan(job, at, optimizer, also, later))
            if warns:
                self._warned = self._plan.warn_if_little_changes(stacklevel=4)
                if self.state == "project" and later:
                    weights = factorized_weights(job.inner, self._plan)
                    warn_of_reset(as_list(optimizer), weights, stacklevel=4)
        self._started = True

    def _first_plan(
        self, job: Job, at: Position, optimizer: Optimizers, also: list[nn.Module], later: bool
    ) -> Plan:
        check_rewrap(job.ddp)
        if self.back is not None and self._decides_alone[1]:
            self.back(at)  # raises if the loop does not pass what it needs
        plan = self._make_plan(job.dense)
        check_change(job, job.dense, plan, optimizer, also, later=later)
        if not plan.shared_inputs and not self._inputs.groups and find_compiled(job.model) is None:
            self._inputs.watch(job.inner, plan)
        return plan

    @property
    def _automatic(self) -> bool:
        """Whether ranks are scaled stable ranks, which need the initial spectra."""
        return self.plan is None and self.rule is None

    def _make_plan(self, model: nn.Module) -> Plan:
        """The plan for a model, with unresolved rank rules. Automatic ones need the initial spectra."""
        if self.plan is not None:
            return self.plan
        if self.rule is not None:
            return make_plan(model, self.rule, keep=self.keep)
        plan = make_plan(model, StableRank(at_most=AT_MOST), keep=self.keep)
        if not self.initial:
            return plan
        spectra = {name: torch.tensor(s, dtype=torch.float64) for name, s in self.initial.items()}
        missing = {e.name for e in plan if e.rule is not None and e.name not in spectra}
        rule = StableRank(dict.fromkeys(missing, 0.0) | spectra, at_most=AT_MOST)
        plan = make_plan(model, rule, keep=self.keep)
        reason = "frozen at the first call of the switch"
        return plan.replace(e.keep_dense(reason) if e.name in missing else e for e in plan)

    def _observe(self, job: Job, at: Position) -> bool:
        """Compute the spectra. Returns whether the ranks have settled, for `RanksSettle`."""
        spectra = shared_spectra(job)
        self._observed = at.unit
        if self.initial is None:
            self.initial = {name: values.tolist() for name, values in spectra.items()}
            if self._automatic:
                self._plan = self._make_plan(job.dense)
        if not isinstance(self.when, RanksSettle):
            return False
        self.history.append({name: stable_rank(values) for name, values in spectra.items()})
        return self.when.settled(self.history)

    def _prepare(
        self, job: Job, at: Position, optimizer: Optimizers, also: list[nn.Module]
    ) -> tuple[Report, float | None]:
        """Check on all workers everything that can fail, and choose the ranks. Changes nothing but what `Job.check` does.

        Returns:
            The report with the plan with all ranks, the same on all workers, and the held-out loss before the switch. An
            automatic plan has no ranks if the change would save too little.
        """
        assert self._plan is not None
        plan = dataclasses.replace(
            self._plan, shared_inputs=self._inputs.shared() or self._plan.shared_inputs
        )
        job.check(lambda dense: check_change(job, dense, plan, optimizer, also, now=True))
        loss = None if self.evaluate is None else self._loss(job)
        chosen = shared_ranks(job, plan)
        little = "" if plan.resolved else saves_little(chosen)
        if little and self._automatic:
            chosen = chosen.replace(e.keep_dense(little) if e.rank else e for e in chosen)
        if job.workers.rank == 0 and not self._warned:  # ranks or times may leave more layers dense
            self._warned = chosen.warn_if_little_changes(stacklevel=3)
            if little and not self._warned:  # ranks that the user asked for are applied
                warnings.warn(f"Switch: {little}; pass lower ranks", stacklevel=3)
        settled = self.when.settled(self.history) if isinstance(self.when, RanksSettle) else None
        return Report(chosen, at, settled=settled), loss

    def _loss(self, job: Job) -> float:
        """Held-out loss of rank 0, on all workers. All of them evaluate, in case `evaluate` calls collectives.

        An error on one worker is raised on all.
        """
        assert self.evaluate is not None
        return job.workers.gather(partial(held_out_loss, job.inner, self.evaluate))[0]

    def _factorized(
        self, job: Job, plan: Plan, optimizer: Optimizers, also: list[nn.Module]
    ) -> tuple[Plan, list[Rewrite]]:
        """The plan with its errors, and the changes, prepared. The factors as they were computed are freed."""
        fill = shared_factors(job, plan)
        changes = [Rewrite(job.inner, as_list(optimizer), self.state == "project")]
        changes += [Rewrite(averaged_model(average, job.inner)) for average in also]
        fills = [fill, *(in_basis_of(fill) for _ in also)]
        done = job.workers.run_on_all(
            lambda: [x.factorize(plan, f) for x, f in zip(changes, fills, strict=True)]
        )
        return done[0], changes

    def _merge(self, job: Job, at: Position, optimizer: Optimizers, also: list[nn.Module]) -> None:
        """Make the model and its averages dense again, on all workers or on none."""
        assert self.report is not None

        def check(dense: nn.Module) -> None:
            check_not_inference(job.workers.caller)
            check_optimizers(optimizer)

        def prepared() -> list[Rewrite]:
            changes = [Rewrite(job.inner, as_list(optimizer), self.state == "project")]
            changes += [Rewrite(averaged_model(average, job.inner)) for average in also]
            for change in changes:
                change.merge()
            return changes

        job.check(check)
        changes = job.workers.run_on_all(prepared)
        changes[0].carrier.warn_of_resets(stacklevel=4)
        report = dataclasses.replace(self.report, merged=at)
        commit(changes, job.workers, [job.ddp, *map(find_ddp, also)], [(self, "report", report)])

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Switch holds hooks and cannot be pickled; save switch.state_dict() instead")

    def state_dict(self) -> dict[str, Any]:
        """State without tensors: numbers and text, for any checkpoint format, such as JSON."""
        plan = self.plan and self.plan.to_json()
        report = self.report.as_json() if self.report else {"plan": plan, "switched": None, "merged": None}
        return report | {
            "initial": self.initial,
            "history": self.history,
            "observed": self._observed,
            "inputs": [list(names) for names in self._inputs.groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. If the saved run had switched, then give the model the low-rank structure:

        `if switch.low_rank: pf.reshape_(model, switch.report.plan)`, then `model.load_state_dict(…)`.
        """
        saved = json.loads(json.dumps(state))  # a copy
        self.initial, self.history = saved["initial"], saved["history"]
        self._observed = saved["observed"]  # inside an epoch, its start is not observed again
        self._inputs.groups = saved["inputs"]  # the resumed run multiplies the same layers together
        self._plan, self._started = None, False  # the next call is a first call again
        self.report = Report.from_json(saved)
        while self._rates:
            self._rates.pop().remove()

    def restore_(self, model: nn.Module, optimizer: Optimizers, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, and give `model` and `optimizer` the structure of the saved run in place.

        If the saved run had switched, a dense model becomes low-rank; its factors are NaN until they are loaded. A
        model that already has this structure is not changed.
        """
        self.load_state_dict(state)
        job = Job(model)
        ranks = ranks_of(job.inner)
        saved_ranks = self.report.plan.ranks if self.report and self.low_rank else {}
        if not ranks and saved_ranks:
            assert self.report is not None
            if job.sharded:
                raise ValueError(
                    "the saved run had switched; build the model, call pf.reshape_ with the saved plan, then shard it"
                )
            check_plan(job.inner, self.report.plan)
            check_wrapper_passed(factorized_weights(job.inner, self.report.plan), job.ddp)
            change = Rewrite(job.inner, check_optimizers(optimizer))
            change.factorize(self.report.plan, nan_factors)
            commit([change], wrappers=[job.ddp])
        elif ranks != saved_ranks:
            raise ValueError(
                f"the model's {len(ranks)} low-rank layers, or their ranks, do not match the {len(saved_ranks)} of the "
                "saved run; pass the dense model"
            )
        self._scale_rates(optimizer)


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
