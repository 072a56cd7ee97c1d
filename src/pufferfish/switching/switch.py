"""`Switch`: when the full-rank warm-up ends, and making the model low-rank in the middle of a running job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..distributed import shared_svd as spread
from ..distributed.rewrap import check_rewrap
from ..layers.names import named_modules, unwrap
from ..lowrank.checks import belongs, fit
from ..lowrank.factorize import by_nan, convert, multiply_out, ranks_of
from ..optim.carry import Optimizers, as_list, check
from ..optim.rewarm import Rewarm, ScaledRate
from ..planning.plan import Plan
from ..planning.planner import as_patterns, resolve, settle
from ..planning.planner import plan as make_plan
from ..planning.rules import RankLike, StableRank, as_rule, stable_rank
from . import fsdp2 as fsdp
from .averages import follow_
from .job import Job, changing, slowest
from .moments import Position, RanksSettle, When, moment_text
from .preview import Evaluate, Preview, held_loss, preview, softened
from .switch_report import Report
from .used_gradients import UsedGradients, refuse_forgotten

Given = TypeVar("Given", bound=Optimizers)


class Switch:
    """Full-rank warm-up, then the switch to low rank, inside your own loop.

    Args:
        plan: what to change, from `pufferfish.plan`; rules in it are answered at the switch.
        rank: instead of a plan, a rank or rule for all layers. With neither, scaled stable ranks: the
            spectra at the start are taken at the first call of `step`, so call it before the first update.
        keep: with `rank`, layers that stay.
        when: `AtEpoch(n)`, `AtStep(n)`, `AtFraction(share)`, `RanksSettle()` (the default) or any function
            of a `Position`.
        back: the same for the way back: the factors are multiplied out for a full-rank finish.
        state: "project" carries the optimizer's moments to the factors, "reset" drops them.
        lr: what the schedule's learning rate is multiplied with from the switch on, or a `Rewarm`.
        evaluate: gives the loss of the (unwrapped) model on a held batch, called in evaluation mode on every
            rank; rank 0's value counts. For the report and for `max_jump`.
        max_jump: share by which that loss may rise; else ranks are raised and layers left dense.
        rewrap: arguments for DDP that cannot be read back from it.

    >>> import pufferfish as pf
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
        lr: float | Rewarm = 1.0,
        evaluate: Evaluate | None = None,
        max_jump: float | None = None,
        rewrap: Mapping[str, Any] | None = None,
    ) -> None:
        if plan is not None and (rank is not None or keep):
            raise ValueError("Switch: a plan says which layers and ranks; give rank= and keep= to pf.plan")
        if state not in ("project", "reset"):
            raise ValueError(f'Switch: state={state!r} is neither "project" nor "reset"')
        if not isinstance(lr, Rewarm) and not lr > 0:
            raise ValueError(f"Switch: lr={lr!r} is neither a factor above 0 nor a Rewarm")
        if max_jump is not None and (evaluate is None or not max_jump >= 0):
            raise ValueError("Switch: max_jump is a share ≥ 0 of the loss that evaluate= gives; give both")
        self.plan = plan
        self.rule = None if rank is None else as_rule(rank)
        self.keep = as_patterns("keep", keep)
        self.when = RanksSettle() if when is None else when
        self.back = back
        self.state = state
        self.lr = lr
        self.evaluate = evaluate
        self.max_jump = max_jump
        self.rewrap = dict(rewrap or {})
        self.report: Report | None = None
        self.initial: dict[str, list[float]] | None = None  # spectra at the start
        self.history: list[dict[str, float]] = []  # stable ranks as observed since
        self._checked = False  # what can be known at the start
        self._last: Position | None = None
        self._observed: Position | None = None
        self._gradients = UsedGradients()
        self._updates: list[int] = []  # since the switch, as loaded
        self._rates: list[ScaledRate] = []

    @property
    def low_rank(self) -> bool:
        """Whether the model is low-rank now: after the switch and not yet back."""
        return self.report is not None and self.merged is None

    @property
    def merged(self) -> Position | None:
        """Where `back` was."""
        return None if self.report is None else self.report.merged

    def __repr__(self) -> str:
        rank = "as planned" if self.plan else self.rule or StableRank()
        now = "not yet switched" if self.report is None else f"low rank since {self.report.position}"
        if self.merged is not None:
            now = f"full rank again since {self.merged}"
        return f"<Switch: {rank}, when={moment_text(self.when)}; {now}>"

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        epoch: int | None = None,
        step: int | None = None,
        total: int | None = None,
        also: Iterable[nn.Module] = (),
    ) -> bool:
        """Call at the start of every epoch (or step), on every rank. True when it switched just now.

        `model` stays the same object, whether plain, DDP or compiled, and so does the optimizer. `also` are
        averaged copies (EMA, SWA) that become low-rank in the same factors.
        """
        at = Position(epoch=epoch, step=step, total=total)
        optimizers, also = as_list(optimizer), list(also)
        self._attach(optimizers)
        if at == self._last or self._over:
            return False
        job = _in_place(model)
        self._gradients.watch(optimizers)
        if not self._due(job, at, optimizers):
            self._last = at
            return False
        if self.report is None:
            chosen, before = self._prepared(job, optimizers, also)
            fill = spread.factors(job.inner, chosen, job.workers)
            done = convert(job.inner, chosen, optimizers, fill, self.state == "project")
            for average in also:
                follow_(average, job.inner, done)
            job.rewrapped(self.rewrap)
            self._switched(job, done, at, before, optimizers)
        else:
            self._merge(job, optimizers, also)
            self.report = dataclasses.replace(self.report, merged=at)
        self._last = at
        return True

    def rebuild(
        self,
        model: nn.Module,
        optimizer: Given,
        *,
        build: Callable[[], nn.Module],
        shard: Callable[[nn.Module], nn.Module | None],
        epoch: int | None = None,
        step: int | None = None,
        total: int | None = None,
    ) -> tuple[nn.Module, Given]:
        """`step` for FSDP2, whose shards cannot be changed in place: a new model, filled layer by layer.

        Args:
            build: makes the dense model, as at the start. It is called on the meta device.
            shard: applies `fully_shard` to it, as at the start.

        Returns:
            The model and the optimizer to go on with: the given ones when the moment has not come. The
            optimizer is the same object in any case, so that schedulers stay attached.
        """
        at = Position(epoch=epoch, step=step, total=total)
        optimizers = as_list(optimizer)
        self._attach(optimizers)
        if at == self._last or self.report is not None:
            return model, optimizer
        if self.back is not None or self.max_jump is not None:
            raise ValueError("switch.rebuild: back= and max_jump= do not work on sharded models")
        job = Job(model, build)
        self._gradients.watch(optimizers)
        if self._due(job, at, optimizers):
            chosen, before = self._prepared(job, optimizers, [])
            model, done = fsdp.rebuild(
                model, optimizers, chosen, build=build, shard=shard, carry=self.state == "project",
                workers=job.workers,
            )  # fmt: skip
            self._switched(Job(model), done, at, before, optimizers)
        self._last = at
        return model, optimizer

    def due(
        self,
        model: nn.Module,
        *,
        epoch: int | None = None,
        step: int | None = None,
        total: int | None = None,
    ) -> bool:
        """Whether `step` would switch (or merge) at this position; on every rank, like `step`."""
        return not self._over and self._due(_in_place(model), Position(epoch=epoch, step=step, total=total))

    def preview(
        self, model: nn.Module, evaluate: Evaluate, ranks: Iterable[RankLike] | None = None
    ) -> Preview:
        """What the loss on a held batch would become, at this switch's ranks or several others. Changes nothing.

        >>> import pufferfish as pf
        >>> model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
        >>> shown = pf.Switch(rank=0.25).preview(model, lambda m: m(x).square().mean(), ranks=[0.1, 0.4])
        >>> [(asked, plan["0"].rank) for asked, plan, loss in shown.rows]
        [('ratio 0.1', 16), ('ratio 0.4', 16)]
        """
        inner = unwrap(model)
        if ranks is None:
            made = [("this switch", self._chosen(inner))]
        else:
            made = [(str(as_rule(r)), make_plan(inner, r, keep=self.keep)) for r in ranks]
        return preview(inner, evaluate, [(asked, resolve(p, inner)) for asked, p in made])

    @property
    def _over(self) -> bool:
        return self.report is not None and (self.back is None or self.merged is not None)

    def _due(self, job: Job, at: Position, optimizers: Iterable[torch.optim.Optimizer] = ()) -> bool:
        """Rank 0 decides. What is compared comes first, so that all ranks look at spectra together or not at all."""
        look, settles = False, False
        if self.report is not None:
            assert self.back is not None
            now = bool(self.back(at))
        elif isinstance(self.when, RanksSettle):
            look, settles = self.when.due(at) and at != self._observed, True
            now = bool(self.when.latest(at))
        else:
            look = self.plan is None and self.rule is None and self.initial is None
            now = bool(self.when(at))
        about = (
            "position, settings, pufferfish version or model (names, types, shapes); all must call step alike"
        )
        facts = self._facts(job.inner, at) if job.workers.size > 1 else ""
        answer = job.workers.agree(facts, look + 2 * now, about)
        if not self._checked and self.report is None:
            job.workers.together(lambda: self._check_early(job, optimizers))
            self._checked = True
        if answer & 1:
            found = job.spectra()
            self.initial = self.initial or {name: s.tolist() for name, s in found.items()}
            if settles:
                self.history.append({name: stable_rank(s) for name, s in found.items()})
            self._observed = at
        return bool(answer & 2) or (
            isinstance(self.when, RanksSettle) and settles and self.when.settled(self.history)
        )

    def _facts(self, model: nn.Module, at: Position) -> str:
        """What must be equal on all ranks."""
        from .. import __version__

        layers = [(name, type(m).__name__) for name, _, m in named_modules(model)]
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        # Ranks may have measured differently; the slowest decides.
        plan = [(e.name, e.shape, "measured" if e.ms else (e.rank, e.rule)) for e in self.plan or ()]
        settings = (
            plan, self.rule, self.keep, moment_text(self.when), moment_text(self.back), self.state, self.lr,
            self.evaluate is None, self.max_jump, self.report is None,
        )  # fmt: skip
        return repr((__version__, at, settings, layers, shapes))

    def _chosen(self, model: nn.Module) -> Plan:
        return self.plan or make_plan(model, self.rule or StableRank(_stable(self.initial)), keep=self.keep)

    def _check_early(self, job: Job, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """What no warm-up mends is refused before it: a pattern or plan for other layers, say."""
        check(optimizers)
        if job.ddp is not None:
            check_rewrap(job.ddp, self.rewrap)
        belongs(job.dense, self._chosen(job.dense))

    def _prepared(
        self, job: Job, optimizers: list[torch.optim.Optimizer], also: list[nn.Module]
    ) -> tuple[Plan, float | None]:
        """Everything that can fail, then the resolved plan and the loss before."""

        def chosen_if_all_is_well() -> Plan:
            check(optimizers)
            self._gradients.refuse_pending(job.inner)
            if job.ddp is not None:
                check_rewrap(job.ddp, self.rewrap)
            chosen = self._chosen(job.dense)
            fit(job.dense, chosen, finite=not job.sharded)
            for average in also:
                fit(unwrap(average), chosen)
            refuse_forgotten(changing(job.inner, chosen), optimizers)
            return chosen

        chosen = job.workers.together(chosen_if_all_is_well)
        chosen = slowest(chosen, job.workers)
        waiting = [e.name for e in chosen if e.rule is not None]
        if waiting:
            chosen = settle(chosen, job.spectra(waiting))
        chosen = Plan.from_json(job.workers.tell(chosen.to_json()))
        if self.max_jump is not None:
            chosen = softened(job.inner, chosen, lambda: self._loss(job) or 0.0, self.max_jump)
        return chosen, self._loss(job)

    def _loss(self, job: Job) -> float | None:
        """Of rank 0, on every rank; all evaluate, in case that needs all."""
        if self.evaluate is None:
            return None
        return float(job.workers.tell(repr(held_loss(job.inner, self.evaluate))))

    def _switched(
        self,
        job: Job,
        done: Plan,
        at: Position,
        before: float | None,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        if not job.sharded:  # a rank's shards are its own
            job.workers.same(job.inner.parameters())
        after = self._loss(job)
        loss = None if before is None or after is None else (before, after)
        self.report = Report(done, at, loss, self.max_jump)
        self._gradients.forget()
        self._attach(optimizers)

    def _merge(self, job: Job, optimizers: list[torch.optim.Optimizer], also: list[nn.Module]) -> None:
        def all_is_well() -> None:
            check(optimizers)
            self._gradients.refuse_pending(job.inner)
            if job.ddp is not None:
                check_rewrap(job.ddp, self.rewrap)

        job.workers.together(all_is_well)
        multiply_out(job.inner, optimizers, self.state == "project")
        for average in also:
            multiply_out(unwrap(average), None)
            Job(average).rewrapped({})
        job.rewrapped(self.rewrap)
        job.workers.same(job.inner.parameters())
        self._gradients.forget()

    def _attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        if optimizers and self.report is not None and self.lr != 1.0 and not self._rates:
            done = self._updates or [0] * len(optimizers)
            self._rates = [ScaledRate(o, self.lr, n) for o, n in zip(optimizers, done, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Tensors-free: numbers and text, for any checkpoint, JSON included."""
        return {
            "plan": self.report.plan.to_json() if self.report else self.plan and self.plan.to_json(),
            "switched": self.report
            and {
                "at": vars(self.report.position),
                "loss": self.report.loss,
                "max_jump": self.report.max_jump,
            },
            "merged": self.merged and vars(self.merged),
            "initial": self.initial,
            "history": self.history,
            "updates": [rate.done for rate in self._rates],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the saved one would. A model that had switched gets its structure by `reshape_` first:

        `if switch.low_rank: pf.reshape_(model, switch.report.plan)`, then `model.load_state_dict(…)`.
        """
        saved = json.loads(json.dumps(state))  # plain data, nothing shared
        self.initial, self.history, self._updates = saved["initial"], saved["history"], saved["updates"]
        self.report, self._last = None, None
        while self._rates:
            self._rates.pop().remove()
        if done := saved["switched"]:
            loss = tuple(done["loss"]) if done["loss"] else None
            merged = saved["merged"] and Position(**saved["merged"])
            plan, limit = Plan.from_json(saved["plan"]), done.get("max_jump")  # older checkpoints do not tell
            self.report = Report(plan, Position(**done["at"]), loss, limit, merged)

    def restore_(self, model: nn.Module, optimizer: Optimizers, state: Mapping[str, Any]) -> None:
        """`load_state_dict`, and the structure for `model` and `optimizer` in place, wrapped or not.

        A dense model whose saved run had switched becomes low-rank; its factors hold NaN until they are
        loaded. One that has the right structure already is left alone.
        """
        self.load_state_dict(state)
        job, optimizers = Job(model), as_list(optimizer)
        now = ranks_of(job.inner)
        wanted = self.report.plan.ranks if self.report and self.low_rank else {}
        if not now and wanted:
            assert self.report is not None
            if job.sharded:
                raise ValueError(
                    "the saved run had switched: build the model, pf.reshape_ it with the saved plan, then shard it"
                )
            fit(job.inner, self.report.plan)
            convert(job.inner, self.report.plan, optimizers, by_nan)
            job.rewrapped(self.rewrap)
        elif now != wanted:
            raise ValueError(
                f"the model is low-rank in {len(now)} layers, the saved run in {len(wanted)} or with other "
                "ranks; give the model as it is before the switch"
            )
        self._attach(optimizers)
        self._gradients.watch(optimizers)


def _in_place(model: nn.Module) -> Job:
    job = Job(model)
    if job.sharded:
        raise ValueError("switch: FSDP2 shards cannot be changed in place; call switch.rebuild")
    return job


def _stable(spectra: dict[str, list[float]] | None) -> dict[str, float] | None:
    if spectra is None:
        return None
    return {name: stable_rank(torch.tensor(s, dtype=torch.float64)) for name, s in spectra.items()}
