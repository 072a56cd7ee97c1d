"""`diagnose`: times the steps of a training loop and predicts what would make them shorter."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from ..compression import BlockInt8, DDPHook, Method, PowerSGD, TopK
from ..compression.fsdp2_hook import group_of, sharded_modules
from ..compression.methods.changed import as_integers, decode, encode
from ..compression.sharded import find_sharded_hook
from ..distributed.ddp import AtLastBucket, find_ddp
from ..distributed.workers import Workers
from ..layers import local_part, unwrap
from ..layers.base import autocast_dtype
from ..layers.names import trainable_parameters
from ..lowrank.factorize import low_rank_shapes
from ..lowrank.optimizers import Optimizers
from ..planning import Plan, autocast_context, plan
from .breakdown import Breakdown, GradientTimeline
from .cost_model import (
    COMPUTE_PARTS,
    CostModel,
    Work,
    built_buckets,
    dry_run,
    probe_bytes,
    wire_bytes,
    with_buckets,
    with_ddp_messages,
)
from .link import Link, probe, wire_factor
from .options import (
    MIN_SPEEDUP,
    RANK_RATIO,
    OptionBuilder,
    ShardedMessage,
    ShardedOptions,
    SpeedupEstimate,
    TrainingOption,
    estimate,
    estimate_table,
    format_seconds,
)

METHODS: tuple[Method, ...] = (BlockInt8(), TopK(0.01), PowerSGD(rank=4))
_WORK_PARTS = (*COMPUTE_PARTS, "encode", "decode")
_WARM_UP_STEPS = 3  # not timed; in the last of them the messages of a sharded model are counted
_KINDS = ("free", "low rank", "compression", "both")
_MIN_BUCKET_SPEEDUP = 1.005  # bucket sizes below it are not reported


@contextmanager
def diagnose(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    steps: int = 30,
    total_steps: int | None = None,
    methods: Sequence[Method] = METHODS,
    measure: bool = False,
    show: bool = True,
) -> Iterator[Diagnosis]:
    """Time the training steps that run in the block; when it ends, predict what would make them shorter.

    Enter it on all workers. Model, gradients, optimizer, random state and hooks are the same afterwards as without `diagnose`. On
    CPUs, where messages slow down computation, predictions use the compute time without that slowdown. Meanwhile a copy of the
    trainable weights in bf16 is kept, to count how many of them change.

    Args:
        model: the model that the loop calls: plain, DDP, with `compress`, compiled; or sharded by FSDP2 over all workers,
            on CPUs, without `compress`.
        optimizer: the optimizers whose steps count (default: all that hold parameters of the model).
        steps: maximum number of timed steps, after three warm-up steps; further steps in the block have no overhead.
        total_steps: number of steps of the whole run, to report hours.
        methods: compression methods to try with DDP. For a sharded model, `compress` is tried with int8 and 4 bits.
        measure: time every layer dense and low-rank instead of assuming time proportional to MACs; layers that are
            slower low-rank stay dense.
        show: print the result on rank 0.

    >>> model = nn.Sequential(nn.Linear(256, 256))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with diagnose(model, steps=5, show=False) as diagnosis:
    ...     for _ in range(5):
    ...         model(torch.ones(8, 256)).sum().backward()
    ...         optimizer.step()
    >>> diagnosis.workers, [option.kind for option in diagnosis.options]
    (1, ['low rank'])
    """
    _check_model(model)
    if steps < 1 or (total_steps is not None and total_steps < 1):
        raise ValueError(f"diagnose: steps={steps} and total_steps={total_steps} must be 1 or more")
    diagnosis = Diagnosis()
    times = _LimitedBreakdown(model, optimizer, steps)
    with GradientTimeline(model) as timeline, times:
        yield diagnosis
    workers = Workers(times.group, times.device, "diagnose")
    _fill(diagnosis, workers, times, timeline, methods, measure, total_steps)
    if show and workers.rank == 0:
        print(diagnosis, flush=True)


@dataclass(kw_only=True)
class Diagnosis:
    """Result of `diagnose`, filled when its block ends. Means over all workers, so equal on all of them.

    `dataclasses.asdict` makes a dict of it that JSON can hold.
    """

    workers: int = 1
    steps: int = 0  # timed steps
    parts: dict[str, float] = field(default_factory=dict)  # mean seconds per step, as in `Breakdown`
    waiting: float = 0.0  # seconds of the exchange spent waiting for the slowest worker
    link: Link | None = None
    predicted: float = 0.0  # seconds of the current step, by the cost model
    ceiling: float = 1.0  # speed-up of a step without any exchange
    hours: float | None = None  # of the whole run at the current speed
    wire_bytes: float = 0.0  # sent by a worker in the current step
    #: Sharded module → bytes that a worker sends in a step for the gathers of its parameters and for the reductions of its
    #: gradients. The latter are those of an all-reduce, which gloo makes of them.
    module_bytes: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: Number of steps → share of the trainable weights that, rounded to bf16, changed in so many steps.
    changed: dict[int, float] = field(default_factory=dict)
    options: list[SpeedupEstimate] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        """Seconds per step that communication costs: waiting for the exchange, encoding and decoding."""
        return self.parts["encode"] + self.parts["exchange"] + self.parts["decode"]

    @property
    def error(self) -> float:
        """Relative error of the cost model's prediction for the current step."""
        return self.predicted / self.parts["step"] - 1

    def __str__(self) -> str:
        if not self.parts:
            return "diagnose: no result yet; it is filled when the block ends"
        return "\n".join([*self._head(), "", *self._table()])

    def _head(self) -> Iterator[str]:
        p = {name: format_seconds(seconds) for name, seconds in self.parts.items()}
        compute, exposed = format_seconds(self.parts["step"] - self.exposed), format_seconds(self.exposed)
        yield f"{self.workers} worker{'s' if self.workers > 1 else ''}, {self.steps} timed steps"
        yield f"step:      {p['step']} = {compute} compute + {exposed} exposed exchange"
        names = ("data", "forward", "backward", "optimizer")
        yield "compute:   " + ", ".join(f"{name} {p[name]}" for name in names)
        if self.changed:
            shares = (f"{share:.2%} in {n} step{'s' * (n > 1)}" for n, share in self.changed.items())
            yield f"changed:   {', '.join(shares)}, of the weights in bf16"
        if self.link is None:
            yield "exchange:  none, one process"
            return
        compressed = self.parts["encode"] + self.parts["decode"] > 0
        coding = f"encode {p['encode']}, decode {p['decode']}, " if compressed else ""
        waiting = f"waiting for the slowest worker {format_seconds(self.waiting)}"
        yield f"exchange:  {coding}{waiting}; hidden behind backward {p['hidden']}"
        if self.module_bytes:
            yield f"sent:      {self._sent()}"
        yield f"link:      {self.link}"
        predicted = f"{format_seconds(self.predicted)} per step ({self.error:+.0%})"
        yield f"predicted: {predicted}; without any exchange {self.ceiling:.2f}× as fast"

    def _sent(self) -> str:
        gathers, reductions = (sum(x) / 1e6 for x in zip(*self.module_bytes.values(), strict=True))
        name, most = max(self.module_bytes.items(), key=lambda item: sum(item[1]))
        both = f"gathers {gathers:.3g} MB, reductions {reductions:.3g} MB"
        return f"{both} by a worker in a step; most for {name}, {sum(most) / 1e6:.3g} MB"

    def _table(self) -> Iterator[str]:
        current = SpeedupEstimate(
            kind="", name="current", step=self.predicted, speedup=1.0, run_speedup=1.0, hours=self.hours,
            wire_bytes=self.wire_bytes,
        )  # fmt: skip
        yield str(estimate_table([current, *self.options]))
        yield ""
        if all(e.run_speedup < MIN_SPEEDUP for e in self.options):
            yield "No option makes the run 5 % shorter: keep the current setup."
        yield "Predicted from this step, this link and dry runs on this device. Model quality is not predicted."


def _check_model(model: nn.Module) -> None:
    """Raise an error for models whose communication cannot be observed."""
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        _check_sharded(model)
        return
    ddp = find_ddp(model)
    if ddp is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise TypeError(
            f"diagnose: the {type(model).__name__} is not wrapped in DistributedDataParallel, but there are "
            f"{dist.get_world_size()} processes; pass the DDP model"
        )
    for hook, state in ddp._comm_hooks if ddp is not None else ():
        if not isinstance(state, DDPHook):
            name = type(state).__name__ if isinstance(state, AtLastBucket) else getattr(hook, "__name__", "")
            raise ValueError(
                f"diagnose: the messages of the communication hook {name} are unknown; use DDP without it, or with "
                "pf.compress"
            )


def _check_sharded(model: nn.Module) -> None:
    """Raise an error for sharded models whose messages cannot be timed or replaced."""
    _, mesh = sharded_modules(model, native_replicas=True)
    if mesh.device_type != "cpu":
        raise TypeError(
            "diagnose: on a GPU, FSDP2 communicates beside its computation, and how much of that is hidden cannot be timed "
            "from outside; compare whole steps with and without pf.compress"
        )
    if mesh.ndim > 1 or mesh.size() != dist.get_world_size():
        raise ValueError(
            "diagnose: only models that FSDP2 shards over all workers, by a 1-D mesh, can be timed"
        )
    if find_sharded_hook(model) is not None:
        raise ValueError(
            "diagnose: the messages of this sharded model are compressed; call pf.compress afterwards"
        )


class _LimitedBreakdown(Breakdown):
    """Skips the warm-up steps, stops after `limit` timed steps, and records how the model was called."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, limit: int) -> None:
        super().__init__(model, optimizer)
        self.limit, self.ended_steps = limit, 0
        self.example: Any = None  # shapes of the first call
        self.autocast: torch.dtype | None = None  # dtype of autocast in that call
        self._weights: list[Tensor] = []  # in bf16, after the first or the second step
        self.changes: list[tuple[int, float]] = []  # steps, and the share of the weights that changed in them
        self.sharded: dict[str, Any] = {}  # modules sharded by FSDP2
        self.group: dist.ProcessGroup | None = self.ddp.process_group if self.ddp else None
        if any(isinstance(m, FSDPModule) for m in model.modules()):
            self.sharded, mesh = sharded_modules(model)
            self.group = mesh.get_group()
        self.messages: list[ShardedMessage] = []  # of FSDP2, in the last step of the warm-up
        self.gathered: set[str] = set()  # modules, since the start of a forward pass

    def __enter__(self) -> _LimitedBreakdown:
        super().__enter__()
        for name, module in self.sharded.items():
            group = group_of(module)
            module.set_custom_all_gather(_TimedCollective(self, name, group._all_gather_comm, gathers=True))
            module.set_custom_reduce_scatter(_TimedCollective(self, name, group._reduce_scatter_comm))
        return self

    def _detach(self) -> None:
        if self._handles:
            for module in self.sharded.values():
                module.set_custom_all_gather(group_of(module)._all_gather_comm.inner)
                module.set_custom_reduce_scatter(group_of(module)._reduce_scatter_comm.inner)
        super()._detach()

    def __exit__(self, kind: object, *_: object) -> None:
        if self._handles:  # otherwise the limit was reached and `read` was called
            super().__exit__(kind)

    def _end_step(self) -> None:
        if self._stepped:
            self.ended_steps += 1
            if self.ended_steps == 2:  # neither of these steps is timed
                self._count_changes(1)
            if self.ended_steps <= 2:
                self._weights = self._bf16_weights()
        super()._end_step()

    def read(self) -> dict[str, float]:
        parts = super().read()
        if self.ended_steps > 2:
            self._count_changes(self.ended_steps - 2)
        self._weights = []
        return parts

    @torch.no_grad()
    def _bf16_weights(self) -> list[Tensor]:
        weights = (p for p in unwrap(self.model).parameters() if p.requires_grad and p.is_floating_point())
        own = (local_part(p) for p in weights)
        return [p.to(torch.bfloat16, copy=True).view(torch.int16) for p in own]

    def _count_changes(self, steps: int) -> None:
        then, now = self._weights, self._bf16_weights()
        if [x.shape for x in then] == [x.shape for x in now]:
            changed = sum(int((x != y).sum()) for x, y in zip(then, now, strict=True))
            self.changes.append((steps, changed / max(1, sum(x.numel() for x in now))))

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        super()._before_forward(model, args, kwargs)
        if torch.is_grad_enabled():
            self.gathered.clear()
        if self.example is None and torch.is_grad_enabled():
            self.example = _example_from_call(unwrap(model), args, kwargs)
            self.autocast = autocast_dtype(self.device)
        if self.ended_steps == _WARM_UP_STEPS and self._count + len(self._pending) == _WARM_UP_STEPS:
            self._pending.clear()
            self._reset()
        elif self.ended_steps == _WARM_UP_STEPS + self.limit and self._handles:
            self._detach()
            self.read()


@dataclass(eq=False)
class _TimedCollective:
    """FSDP2's own collective of a sharded module, timed, and noted in the last step of the warm-up."""

    times: _LimitedBreakdown
    name: str  # of the module
    inner: Any  # FSDP2's own
    gathers: bool = False
    before: Tensor | None = None  # this worker's shard, as it was gathered last

    def allocate(self, *size: Any, **options: Any) -> Tensor:
        memory: Tensor = self.inner.allocate(*size, **options)
        return memory

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any
    ) -> Any:
        times = self.times
        part = times._marks[-1][0]  # of the step, that runs now
        if dist.get_world_size(group) != dist.get_world_size(times.group):
            raise ValueError(
                f"diagnose: the parameters of {self.name} are gathered from some of the workers; use "
                "reshard_after_forward=True or False"
            )
        send = partial(self.inner, output_tensor=output_tensor, input_tensor=input_tensor, group=group)
        if part not in ("forward", "backward"):  # evaluation
            return send(**options)
        if times.ended_steps == _WARM_UP_STEPS - 1:
            self._note(output_tensor, input_tensor)
        if self.gathers:  # in the step before that, and in that step
            times.gathered.add(self.name)
            known = 0 < times.ended_steps < _WARM_UP_STEPS
            self.before = as_integers(input_tensor).clone() if known else None
        times._mark("exchange")
        sent = send(**options)
        times._mark(part)
        return sent

    def _note(self, output: Tensor, shard: Tensor) -> None:
        """Note the message, and try how `Changed` would send it."""
        changes, start = 0, time.perf_counter()
        if self.gathers and self.before is not None:
            counts, code = encode(as_integers(shard), self.before)
            changes = len(code)
            for _ in range(len(output) // len(shard)):  # what the others send takes as long
                decode(counts, code, self.before)
                self.before.clone()
        self.times.messages.append(
            ShardedMessage(
                module=self.name,
                gathers=self.gathers,
                first=self.gathers and self.name not in self.times.gathered,
                elements=min(len(output), len(shard)),
                itemsize=shard.itemsize,
                changes=changes,
                coding=time.perf_counter() - start,
            )
        )


def _example_from_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert the arguments of a call to an example for `plan`; tensors become meta tensors, so no batch is kept alive."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args
    if bound.args and any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values()):
        return bound.args
    named = dict(bound.arguments)
    for p in bound.signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            named |= named.pop(p.name, {})
    return named


def _fill(
    diagnosis: Diagnosis,
    workers: Workers,
    times: _LimitedBreakdown,
    timeline: GradientTimeline,
    methods: Sequence[Method],
    measure: bool,
    total_steps: int | None,
) -> None:
    """Fill the diagnosis. Runs on all workers; an error on one of them is raised on all, so that none waits forever."""
    model, size = unwrap(times.model), workers.size

    plan_text, note, curve = json.loads(workers.gather(lambda: _plan_and_curve(times, timeline, measure))[0])

    diagnosis.workers, diagnosis.steps = size, times.steps
    diagnosis.parts, diagnosis.waiting = _mean_parts(times.parts, workers)
    shares = workers.mean([share for _, share in times.changes])
    diagnosis.changed = {steps: share for (steps, _), share in zip(times.changes, shares, strict=True)}
    messages = _gathered_messages(times, workers)
    diagnosis.module_bytes = {name: _sent(messages, name, size) for name in times.sharded}
    if size > 1:
        diagnosis.link = probe(workers.group, times.device, largest=probe_bytes(model))
    costs = CostModel(link=diagnosis.link or Link.nominal(bandwidth=1e12, latency=0, size=1))

    def build_options() -> tuple[OptionBuilder | ShardedOptions, list[TrainingOption]]:
        measured = replace(_current_work(times, size), gradient_curve=tuple(map(tuple, curve)))
        if times.sharded:
            sharded = ShardedOptions(measured, size, costs.link.per_node, messages)
            return sharded, list(sharded.options())
        work, plan = costs.without_contention(measured), Plan.from_json(plan_text)
        method = times.hook.method if times.hook is not None else None
        builder = OptionBuilder(model, work, size, method, plan, note)
        return builder, list(builder.options(methods))

    builder, options = workers.run_on_all(build_options)
    diagnosis.wire_bytes = wire_bytes(builder.work, size)
    seconds = diagnosis.parts["step"]
    diagnosis.hours = seconds * total_steps / 3600 if total_steps else None
    current, waiting = _mean_work(builder.work, workers), diagnosis.waiting
    diagnosis.predicted = costs.predict(current, size).step + waiting
    diagnosis.ceiling = seconds / (seconds - diagnosis.exposed + waiting)

    def estimated(option: TrainingOption) -> SpeedupEstimate:
        warm_up = option.warm_up and _mean_work(option.warm_up, workers)
        mean = replace(option, work=_mean_work(option.work, workers), warm_up=warm_up)
        return estimate(mean, current, costs, size, waiting=waiting, hours=diagnosis.hours)

    estimates = [estimated(option) for option in options]
    compressed = [(e.speedup, o) for e, o in zip(estimates, options, strict=True) if o.method is not None]
    # Speed-ups are equal on all workers, so all combine the same method.
    if compressed and isinstance(builder, OptionBuilder) and builder.plan.ranks:
        best = max(compressed, key=lambda pair: pair[0])[1]
        estimates.append(estimated(workers.run_on_all(lambda: builder.combined_option(best))))
    diagnosis.options = _reported(estimates)


def _plan_and_curve(times: _LimitedBreakdown, timeline: GradientTimeline, measure: bool) -> str:
    """Plan, its note, and the gradients' timeline, as JSON; no plan for a sharded model."""
    if not times.steps:
        raise ValueError("diagnose: no optimizer step of the model ended in the block, so none was timed")
    if times.sharded:
        if not times.messages:
            raise ValueError(f"diagnose: a sharded model needs {_WARM_UP_STEPS} steps or more in the block")
        return json.dumps(["", "", timeline.curve()])
    with autocast_context(times.autocast, times.device):
        plan, note = _plan_for_example(unwrap(times.model), times.example, measure)
    return json.dumps([plan.to_json(), note, timeline.curve()])


def _gathered_messages(times: _LimitedBreakdown, workers: Workers) -> list[ShardedMessage]:
    """FSDP2's messages in a step, with the changes of the worker that sends most."""
    all_rows = workers.gather(lambda: [asdict(m) for m in times.messages])
    rows = [[ShardedMessage(**row) for row in rows] for rows in all_rows]
    return [
        replace(same[0], changes=max(m.changes for m in same), coding=fmean(m.coding for m in same))
        for same in zip(*rows, strict=True)
    ]


def _sent(messages: Sequence[ShardedMessage], module: str, size: int) -> tuple[float, float]:
    """Bytes that a worker sends for the gathers and for the reductions of a module."""
    sent = {True: 0.0, False: 0.0}
    for m in messages:
        if m.module == module:
            kind, nbytes = m.message(size)
            sent[m.gathers] += wire_factor(kind, size) * nbytes
    return sent[True], sent[False]


def _plan_for_example(model: nn.Module, example: Any, measure: bool) -> tuple[Plan, str]:
    """Plan `model` at `RANK_RATIO`; returns the plan and a note on how its compute time is known."""
    warm_up = "a third of the run is warm-up"
    try:
        low_rank = plan(model, RANK_RATIO, example=example, measure=measure and example is not None)
        note = f"{'layers timed' if measure else 'time assumed proportional to MACs'}; {warm_up}"
    except Exception:  # a model that reads values may fail in any way on meta tensors
        low_rank = plan(model, RANK_RATIO)
        note = f"MACs unknown, compute time assumed unchanged; {warm_up}"
    try:
        low_rank_shapes(model, low_rank)
    except ValueError as error:
        low_rank = low_rank.replace(e.keep_dense(str(error)) for e in low_rank)
    return low_rank, note


def _current_work(times: _LimitedBreakdown, size: int) -> Work:
    """The timed step as `Work`."""
    compute: dict[str, Any] = {name: max(0.0, times.parts[name]) for name in _WORK_PARTS}
    work = Work(**compute)
    if size == 1 or times.ddp is None:
        return work
    if times.hook is None:
        return with_buckets(work, built_buckets(times.ddp))
    parameters = trainable_parameters(times.model)
    traffic = dry_run(times.hook.engine.settings, parameters, size, steps=1)
    if times.device.type == "cpu":  # on a GPU the compression is measured as a part of the exchange
        traffic = replace(traffic, encode=work.encode, decode=work.decode)
    return replace(with_ddp_messages(work, parameters), **vars(traffic))


def _mean_work(work: Work, workers: Workers) -> Work:
    """`work` with the compute times averaged over the workers."""
    means = workers.mean([getattr(work, name) for name in _WORK_PARTS])
    compute: dict[str, Any] = dict(zip(_WORK_PARTS, means, strict=True))
    return replace(work, **compute)


def _mean_parts(parts: dict[str, float], workers: Workers) -> tuple[dict[str, float], float]:
    """Means over the workers, and how long the mean worker waits for the one that computes longest."""
    own = torch.tensor([parts["step"] - parts["exchange"]], dtype=torch.float64)
    means = dict(zip(parts, workers.mean(list(parts.values())), strict=True))
    waiting = float(workers.max(own)) - (means["step"] - means["exchange"])
    return means, min(max(0.0, waiting), means["exchange"])


def _reported(estimates: Sequence[SpeedupEstimate]) -> list[SpeedupEstimate]:
    """Sort by kind; of the bucket sizes keep only the best, and only if it makes the step shorter."""
    buckets = [e for e in estimates if e.kind == "buckets" and e.speedup > _MIN_BUCKET_SPEEDUP]
    kept = [e for e in estimates if e.kind != "buckets"]
    if buckets:
        kept.append(replace(max(buckets, key=lambda e: e.speedup), kind="free"))
    return sorted(kept, key=lambda e: _KINDS.index(e.kind))
