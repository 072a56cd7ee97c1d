"""`Switch`: ends the full-rank warm-up and makes the model low-rank inside a running training loop."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..distributed.ddp import Job
from ..layers.names import unwrap
from ..lowrank.checks import check_plan, check_wrapper_passed, factorized_weights
from ..lowrank.factorize import ranks_of
from ..lowrank.rewrite import Fill, Rewrite, nan_factors
from ..optim.carry import Optimizers, Undo, as_list
from ..optim.scaled_rate import ScaledRate
from ..planning.plan import Plan
from ..planning.planner import as_patterns
from ..planning.planner import plan as make_plan
from ..planning.rules import RankLike, StableRank, as_rule
from .averages import averaged_model, in_basis_of
from .decision import Decision
from .fsdp2 import ShardedJob, rebuild
from .moments import Position, RanksSettle, When, moment_text
from .report import Evaluate, Preview, Report, preview
from .switch_settings import SwitchSettings

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
        self.settings = SwitchSettings(
            plan=plan,
            rule=None if rank is None else as_rule(rank),
            keep=as_patterns("keep", keep),
            when=RanksSettle() if when is None else when,
            back=back,
            state=state,
            lr=lr,
            evaluate=evaluate,
        )
        self.report: Report | None = None
        self._decision = Decision(self.settings)
        self._rates: list[ScaledRate] = []

    @property
    def when(self) -> When | RanksSettle:
        """Moment of the switch."""
        return self.settings.when

    @property
    def initial(self) -> dict[str, list[float]] | None:
        """Spectra at the first call by entry name, if they were needed."""
        return self._decision.initial

    @property
    def history(self) -> list[dict[str, float]]:
        """Stable ranks by entry name, one mapping for each observation by `RanksSettle`."""
        return self._decision.history

    @property
    def low_rank(self) -> bool:
        """Whether the model is low-rank now: after a switch that did not leave it dense, and before `back`."""
        return self.report is not None and bool(self.report.plan.ranks) and self.merged is None

    @property
    def merged(self) -> Position | None:
        """Position at which the model became full-rank again, or None."""
        return None if self.report is None else self.report.merged

    def __repr__(self) -> str:
        rank = "as planned" if self.settings.plan else self.settings.rule or StableRank()
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
        self._decision.warn_past_total(at)
        optimizers, also = as_list(optimizer), list(also)
        self._scale_rates(optimizers)
        if self._skips(at):
            return False
        job = _job_in_place(model, "switch.step", group)
        if not self._decision.due(job, at, self.report is not None, optimizers, also):
            return False
        if self.report is None:
            plan, loss = self._decision.prepare(job, optimizers, also)
            if plan.ranks:
                fill = job.factors(plan)
                plan, changes = job.workers.run_on_all(
                    lambda: self._factorized(job, plan, fill, optimizers, also)
                )
                del fill
                job.commit(
                    changes,
                    also,
                    agree=True,
                    then=lambda undo: self._report(plan, at, undo),
                )
                changes.pop(0).carrier.warn_of_resets(stacklevel=3)
                del changes
            else:
                self._report(plan, at, Undo())
            self._finish(job, loss, optimizers)
        else:
            self._merge(job, at, optimizers, also)
        return bool(self.report and self.report.plan.ranks)

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
        self._decision.warn_past_total(at)
        optimizers = as_list(optimizer)
        self._scale_rates(optimizers)
        if self.report is not None:
            return model, optimizer
        if self.settings.back is not None:
            raise ValueError("switch.rebuild: back= is not supported for sharded models")
        if self._skips(at):
            return model, optimizer
        job = ShardedJob(model, build)
        if self._decision.due(job, at, False, optimizers, []):
            plan, loss = self._decision.prepare(job, optimizers, [])
            if plan.ranks:
                model, plan = rebuild(
                    model, optimizers, plan, build=build, shard=shard, carry=self.settings.state == "project",
                    workers=job.workers,
                )  # fmt: skip
            self._report(plan, at, Undo())
            self._finish(Job(model, "switch.rebuild"), loss, optimizers)
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

        Args:
            optimizer: Checked at the first call, as by `step`.
        """
        at = Position(epoch=epoch, step=step, total=total)
        if self._skips(at):
            return False
        job = _job_in_place(model, "switch.due", group)
        return self._decision.due(job, at, self.report is not None, as_list(optimizer), [])

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
            plans = [("this switch", self.settings.make_plan(inner, self.initial))]
        else:
            plans = [(str(as_rule(r)), make_plan(inner, r, keep=self.settings.keep)) for r in ranks]
        return preview(inner, evaluate, plans)

    def _skips(self, at: Position) -> bool:
        """Whether there is nothing to do at this position, known without the model and the other workers."""
        over = self.report is not None and (self.settings.back is None or not self.low_rank)
        return over or self._decision.not_due(at, self.report is not None)

    def _factorized(
        self, job: Job, plan: Plan, fill: Fill, optimizers: list[Optimizer], also: list[nn.Module]
    ) -> tuple[Plan, list[Rewrite]]:
        """The changes of the model and of its averages, prepared, and the plan with its errors."""
        change = Rewrite(job.inner, optimizers, self.settings.state == "project")
        changes = [change, *(Rewrite(averaged_model(average, job.inner), None) for average in also)]
        for average in changes[1:]:
            average.factorize(plan, in_basis_of(fill))
        return change.factorize(plan, fill), changes

    def _report(self, plan: Plan, at: Position, undo: Undo) -> None:
        settled = self.when.settled(self.history) if isinstance(self.when, RanksSettle) else None
        undo.setattr(self, "report", Report(plan, at, settled=settled))

    def _finish(self, job: Job, before: float | None, optimizers: list[Optimizer]) -> None:
        self._scale_rates(optimizers)
        after = self._decision.loss(job)  # last: an error in it must not hide that the model has changed
        if self.report is not None and before is not None and after is not None:
            self.report = dataclasses.replace(self.report, loss=(before, after))

    def _merge(self, job: Job, at: Position, optimizers: list[Optimizer], also: list[nn.Module]) -> None:
        assert self.report is not None
        job.checked(lambda: self._decision.check(job, optimizers))
        changes = [Rewrite(job.inner, optimizers, self.settings.state == "project")]
        changes += [Rewrite(averaged_model(average, job.inner), None) for average in also]

        def prepare() -> None:
            for change in changes:
                change.merge()

        job.workers.run_on_all(prepare)
        report = dataclasses.replace(self.report, merged=at)
        job.commit(
            changes,
            also,
            agree=True,
            then=lambda undo: undo.setattr(self, "report", report),
        )
        changes[0].carrier.warn_of_resets()

    def _scale_rates(self, optimizers: list[Optimizer]) -> None:
        """After the switch, scale the learning rates of the optimizers by `lr`, once."""
        switched = self.report and self.report.plan.ranks
        if optimizers and switched and self.settings.lr != 1.0 and not self._rates:
            self._rates = [ScaledRate(optimizer, self.settings.lr) for optimizer in optimizers]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Switch holds hooks and cannot be pickled; save switch.state_dict() instead")

    def state_dict(self) -> dict[str, Any]:
        """State without tensors: numbers and text, for any checkpoint format, such as JSON."""
        plan = self.settings.plan and self.settings.plan.to_json()
        report = self.report.as_json() if self.report else {"plan": plan, "switched": None, "merged": None}
        return report | self._decision.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. If the saved run had switched, then give the model the low-rank structure:

        `if switch.low_rank: pf.reshape_(model, switch.report.plan)`, then `model.load_state_dict(…)`.
        """
        saved = json.loads(json.dumps(state))  # a copy
        self._decision.load(saved)
        self.report = Report.from_json(saved)
        while self._rates:
            self._rates.pop().remove()

    def restore_(self, model: nn.Module, optimizer: Optimizers, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, and give `model` and `optimizer` the structure of the saved run in place.

        If the saved run had switched, a dense model becomes low-rank; its factors are NaN until they are loaded. A
        model that already has this structure is not changed.
        """
        self.load_state_dict(state)
        job, optimizers = Job(model), as_list(optimizer)
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
            change = Rewrite(job.inner, optimizers)
            change.factorize(self.report.plan, nan_factors)
            job.commit([change])
        elif ranks != saved_ranks:
            raise ValueError(
                f"the model's {len(ranks)} low-rank layers, or their ranks, do not match the {len(saved_ranks)} of the "
                "saved run; pass the dense model"
            )
        self._scale_rates(optimizers)


def _job_in_place(model: nn.Module, caller: str, group: dist.ProcessGroup | None) -> Job:
    job = Job(model, caller, group)
    if job.sharded:
        raise ValueError("switch.step cannot change FSDP2 shards in place; call switch.rebuild")
    return job
