"""`Switch`: when the full-rank warm-up ends, and making the model low-rank in the middle of a running job."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .ddp import check_rewrap, find_ddp, rewrap_
from .factorize import by_svd, convert, empty_factors
from .fit import fit
from .names import named_modules, unwrap
from .optim import Optimizers, as_list, check
from .plan import Entry, Plan
from .planning import plan as make_plan
from .planning import resolve, spectra
from .rank import RankLike, StableRank, as_rule, stable_rank
from .ranks import Workers, balanced, svd_cost
from .table import aligned
from .when import Position, RanksSettle, When


@dataclass(frozen=True)
class Report:
    """What the switch did."""

    plan: Plan
    position: Position

    @property
    def worst(self) -> list[Entry]:
        """The five layers that lost most."""
        changed = [e for e in self.plan if e.error is not None]
        return sorted(changed, key=lambda e: -(e.error or 0.0))[:5]

    def __str__(self) -> str:
        b, a = self.plan.before, self.plan.after
        where = ", ".join(
            f"{k} {v}" for k, v in vars(self.position).items() if v is not None and k != "total"
        )
        head = f"Switched to low rank at {where}: {b.parameters:,} → {a.parameters:,} parameters"
        rows = [["worst layers", "rank", "energy kept", "relative error"]]
        rows += [
            [e.name, str(e.rank), f"{1 - (e.error or 0) ** 2:.1%}", f"{e.error:.3f}"] for e in self.worst
        ]
        return f"{head}\n{aligned(rows, left=(0,))}"


class Switch:
    """Full-rank warm-up, then the switch to low rank, inside your own loop.

    Args:
        plan: what to change, from `pufferfish.plan`; rules in it are answered at the switch.
        rank: instead of a plan, a rank or rule for all layers. With neither, scaled stable ranks: their
            spectra are taken at the first call of `step`, so call it before the first update.
        keep: with `rank`, layers that stay.
        when: `AtEpoch(n)`, `AtStep(n)`, `AtFraction(share)`, `RanksSettle()` (the default) or any function
            of a `Position`.
        state: "project" carries the optimizer's moments to the factors, "reset" drops them.
        rewrap: arguments for DDP that cannot be read back from it.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> switch = pf.Switch(rank=0.25, when=pf.AtEpoch(2))
    >>> [switch.step(model, optimizer, epoch=epoch) for epoch in range(4)]
    [False, False, True, False]
    >>> switch.report.plan.ranks
    {'0': {'': 16}}
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        rank: RankLike | None = None,
        keep: Iterable[str] = (),
        when: When | RanksSettle | None = None,
        state: Literal["project", "reset"] = "project",
        rewrap: Mapping[str, Any] | None = None,
    ) -> None:
        if plan is not None and (rank is not None or keep):
            raise ValueError("Switch: a plan says which layers and ranks; give rank= and keep= to pf.plan")
        if state not in ("project", "reset"):
            raise ValueError(f'Switch: state={state!r} is neither "project" nor "reset"')
        self.plan = plan
        self.rule = None if rank is None else as_rule(rank)
        self.keep = tuple(keep)
        self.when = RanksSettle() if when is None else when
        self.state = state
        self.rewrap = dict(rewrap or {})
        self.report: Report | None = None
        self.initial: dict[str, float] | None = None  # stable ranks at the start
        self.history: list[dict[str, float]] = []  # and as observed since
        self._last: Position | None = None
        self._observed: Position | None = None
        self._used: dict[int, tuple[int, int]] = {}  # parameter → the gradient that its last update used
        self._handles: list[Any] = []

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        epoch: int | None = None,
        step: int | None = None,
        total: int | None = None,
    ) -> bool:
        """Call at the start of every epoch (or step), on every rank. True when it switched just now.

        `model` stays the same object, whether plain, DDP or compiled, and so does the optimizer.
        """
        at = Position(epoch=epoch, step=step, total=total)
        if self.report is not None or at == self._last:
            return False
        self._watch(as_list(optimizer))
        inner, ddp = unwrap(model), find_ddp(model)
        workers = Workers(ddp.process_group if ddp else None, next(inner.parameters()).device)
        due = self._due(inner, at)
        about = (
            "position, settings, pufferfish version or model (names, types, shapes); all must call step alike"
        )
        if not workers.agree(self._facts(inner, at), due, about):
            self._last = at
            return False
        # What is wrong on one rank alone must stop the others too, or they would wait for it.
        problem: Exception | None = None
        try:
            self._check(inner, ddp, optimizer)
            chosen = self.plan or make_plan(inner, self.rule or StableRank(self.initial), keep=self.keep)
            fit(inner, chosen, finite=True)
        except (ValueError, TypeError) as error:
            problem = error
        workers.agree(
            repr(problem), True, f"what keeps them from switching; on rank {workers.rank}: {problem}"
        )
        if problem is not None:
            raise problem
        while self._handles:
            self._handles.pop().remove()
        chosen = Plan.from_json(workers.tell(resolve(chosen, inner).to_json() if workers.rank == 0 else ""))
        done = convert(
            inner, chosen, optimizer, self._spread(inner, chosen, workers), self.state == "project"
        )
        if ddp is not None:
            rewrap_(ddp, self.rewrap)
        if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
            torch.compiler.reset()  # compiled code is for the dense layers and keeps them alive
        gc.collect()  # the old reducer and compiled code lie in cycles: give their memory back now, not some day
        workers.same(inner.parameters())
        self.report, self._last = Report(done, at), at
        return True

    def _due(self, model: nn.Module, at: Position) -> bool:
        if not isinstance(self.when, RanksSettle):
            if self.plan is None and self.rule is None and self.initial is None:
                self.initial = _stable_ranks(model)
            return bool(self.when(at))
        if self.when.due(at) and at != self._observed:
            self.history.append(_stable_ranks(model))
            self.initial = self.initial or self.history[0]
            self._observed = at
        return self.when.settled(self.history) or self.when.latest(at)

    def _facts(self, model: nn.Module, at: Position) -> str:
        """What must be equal on all ranks."""
        from . import __version__

        layers = [(name, type(m).__name__) for name, _, m in named_modules(model)]
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        settings = (self.plan.hash if self.plan else repr(self.rule), self.keep, repr(self.when), self.state)
        return repr((__version__, at, settings, layers, shapes))

    def _check(self, model: nn.Module, ddp: Any, optimizer: Optimizers) -> None:
        check(as_list(optimizer))
        if ddp is not None:
            check_rewrap(ddp, self.rewrap)
        for name, p in model.named_parameters():
            if p.grad is not None and self._used.get(id(p)) != _stamp(p.grad) and p.grad.any():
                raise ValueError(
                    f"{name}: a gradient is pending that no optimizer.step has used; switch between updates, or "
                    "call optimizer.zero_grad() first"
                )

    def _watch(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Note which gradients an update has used: loops that clear them late still hold them at the switch."""

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self._used |= {id(p): _stamp(p.grad) for p in params if p.grad is not None}

        if not self._handles:
            self._handles = [optimizer.register_step_post_hook(note) for optimizer in optimizers]

    def _spread(self, model: nn.Module, plan: Plan, workers: Workers) -> Any:
        """Each SVD once for the whole job, shared out by cost, then sent to all."""
        entries = [e for e in plan if e.rank is not None and e.matrix is not None]
        owners = balanced([svd_cost(e.matrix) for e in entries if e.matrix], workers.size)
        owner = {e.name: o for e, o in zip(entries, owners, strict=True)}
        layers = {name: m for name, _, m in named_modules(model)}
        mine = {
            e.name: by_svd(e, layers[e.layer].get_parameter(e.matrix.weight))
            for e in entries
            if e.matrix is not None and owner[e.name] == workers.rank
        }
        del layers

        def fill(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
            if e.name in mine:
                down, up, error = mine.pop(e.name)
                down, up = (x.to(weight.dtype).contiguous() for x in (down, up))
            else:
                (down, up), error = empty_factors(e, weight), None
            lost = torch.tensor([error or 0.0], dtype=torch.float64, device=weight.device)
            for x in (down, up, lost):
                workers.share(x, owner[e.name])
            return down, up, float(lost)

        return fill

    def state_dict(self) -> dict[str, Any]:
        """Tensors-free: numbers and text, for any checkpoint, JSON included."""
        return {
            "plan": self.report.plan.to_json() if self.report else self.plan and self.plan.to_json(),
            "switched": self.report is not None,
            "at": vars(self.report.position) if self.report else None,
            "initial": self.initial,
            "history": self.history,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the saved one would. A model that had switched gets its structure by `reshape_` first:

        `pf.reshape_(model, switch.report.plan)`, then `model.load_state_dict(…)`.
        """
        saved = json.loads(json.dumps(state))  # plain data, nothing shared
        self.initial, self.history = saved["initial"], saved["history"]
        self._last = None
        if saved["switched"]:
            self.report = Report(Plan.from_json(saved["plan"]), Position(**saved["at"]))


def _stamp(gradient: Tensor) -> tuple[int, int]:
    """Changes whenever something is added to the gradient, or another takes its place."""
    return gradient.data_ptr(), gradient._version


def _stable_ranks(model: nn.Module) -> dict[str, float]:
    return {name: stable_rank(s) for name, s in spectra(model).items()}
