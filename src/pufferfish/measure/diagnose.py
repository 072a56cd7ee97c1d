"""`diagnose`: times the steps of a training loop and predicts what would make them shorter."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..compression import BlockInt8, DDPHook, Method, PowerSGD, TopK
from ..distributed.ddp import AtLastBucket, find_ddp
from ..distributed.workers import Workers
from ..layers.base import autocast_dtype
from ..layers.names import unwrap
from ..optim.carry import Optimizers
from ..planning.plan import Plan
from ..planning.profile import autocast_context
from .breakdown import Breakdown
from .cost_model import CostModel, Work
from .diagnosis import Diagnosis
from .dry_run import dry_run
from .gradient_timeline import GradientTimeline
from .link import Link
from .low_rank_shapes import example_from_call, plan_for_example
from .option_builder import OptionBuilder, TrainingOption
from .probe import probe
from .speedup_estimate import SpeedupEstimate, estimate, wire_bytes
from .step_messages import probe_bytes, trainable_parameters, with_ddp_messages

METHODS: tuple[Method, ...] = (BlockInt8(), TopK(0.01), PowerSGD(rank=4))
_COMPUTE_PARTS = ("data", "forward", "backward", "encode", "decode", "optimizer")
_WARM_UP_STEPS = 3  # not timed
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
        model: the model that the loop calls: plain, DDP, with `compress`, compiled.
        optimizer: the optimizers whose steps count (default: all that hold parameters of the model).
        steps: maximum number of timed steps, after three warm-up steps; further steps in the block have no overhead.
        total_steps: number of steps of the whole run, to report hours.
        methods: compression methods to try.
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
    workers = Workers(times.ddp.process_group if times.ddp else None, times.device, "diagnose")
    _fill(diagnosis, workers, times, timeline, methods, measure, total_steps)
    if show and workers.rank == 0:
        print(diagnosis, flush=True)


def _check_model(model: nn.Module) -> None:
    """Raise an error for models whose communication cannot be observed."""
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise TypeError(
            "diagnose: FSDP2 communicates inside forward and backward, which cannot be timed separately; pass a DDP model"
        )
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


class _LimitedBreakdown(Breakdown):
    """Skips the warm-up steps, stops after `limit` timed steps, and records how the model was called."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, limit: int) -> None:
        super().__init__(model, optimizer)
        self.limit, self.ended_steps = limit, 0
        self.example: Any = None  # shapes of the first call
        self.autocast: torch.dtype | None = None  # dtype of autocast in that call
        self._weights: list[Tensor] = []  # in bf16, after the first or the second step
        self.changes: list[
            tuple[int, float]
        ] = []  # number of steps, share of the weights that changed in them

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
        return [p.to(torch.bfloat16, copy=True).view(torch.int16) for p in weights]

    def _count_changes(self, steps: int) -> None:
        then, now = self._weights, self._bf16_weights()
        if [x.shape for x in then] == [x.shape for x in now]:
            changed = sum(int((x != y).sum()) for x, y in zip(then, now, strict=True))
            self.changes.append((steps, changed / sum(x.numel() for x in now)))

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        super()._before_forward(model, args, kwargs)
        if self.example is None and torch.is_grad_enabled():
            self.example = example_from_call(unwrap(model), args, kwargs)
            self.autocast = autocast_dtype(self.device)
        if self.ended_steps == _WARM_UP_STEPS and self._count + len(self._pending) == _WARM_UP_STEPS:
            self._pending.clear()
            self._reset()
        elif self.ended_steps == _WARM_UP_STEPS + self.limit and self._handles:
            self._detach()
            self.read()


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

    def plan_and_curve() -> str:
        if not times.steps:
            raise ValueError("diagnose: no optimizer step of the model ended in the block, so none was timed")
        with autocast_context(times.autocast, times.device):
            plan, note = plan_for_example(model, times.example, measure)
        return json.dumps([plan.to_json(), note, timeline.curve()])

    plan_text, note, curve = json.loads(workers.broadcast_object(workers.run_on_all(plan_and_curve)))

    diagnosis.workers, diagnosis.steps = size, times.steps
    diagnosis.parts, diagnosis.waiting = _mean_parts(times.parts, workers)
    shares = workers.mean([share for _, share in times.changes])
    diagnosis.changed = {steps: share for (steps, _), share in zip(times.changes, shares, strict=True)}
    if size > 1:
        diagnosis.link = probe(workers.group, times.device, largest=probe_bytes(model))
    costs = CostModel(link=diagnosis.link or Link.nominal(bandwidth=1e12, latency=0, size=1))

    def build_options() -> tuple[OptionBuilder, list[TrainingOption]]:
        measured = replace(_current_work(times, size), gradient_curve=tuple(map(tuple, curve)))
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
    if (
        compressed and builder.plan.ranks
    ):  # speed-ups are equal on all workers, so all combine the same method
        best = max(compressed, key=lambda pair: pair[0])[1]
        estimates.append(estimated(workers.run_on_all(lambda: builder.combined_option(best))))
    diagnosis.options = _reported(estimates)


def _current_work(times: _LimitedBreakdown, size: int) -> Work:
    """The timed step as `Work`."""
    compute: dict[str, Any] = {name: max(0.0, times.parts[name]) for name in _COMPUTE_PARTS}
    work = Work(**compute)
    if size == 1 or times.ddp is None:
        return work
    if times.hook is not None:
        parameters = trainable_parameters(unwrap(times.model))
        traffic = dry_run(times.hook.engine.settings, parameters, size, steps=1)
        plain = with_ddp_messages(work, parameters)
        if times.device.type != "cpu":  # measured as a part of the exchange
            plain = replace(plain, encode=traffic.encode, decode=traffic.decode)
        return replace(plain, messages=traffic.messages, overlaps=traffic.overlaps)
    log = times.ddp._get_ddp_logging_data()
    buckets = tuple(map(int, str(log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes")).split(",")))
    messages = tuple(("all_reduce", n) for n in buckets)
    return replace(work, messages=messages, overlaps=True, bucket_bytes=buckets)


def _mean_work(work: Work, workers: Workers) -> Work:
    """`work` with the compute times averaged over the workers."""
    means = workers.mean([getattr(work, name) for name in _COMPUTE_PARTS])
    compute: dict[str, Any] = dict(zip(_COMPUTE_PARTS, means, strict=True))
    return replace(work, **compute)


def _mean_parts(parts: dict[str, float], workers: Workers) -> tuple[dict[str, float], float]:
    """Means over the workers, and how long the mean worker waits for the one that computes longest."""
    own = torch.tensor([parts["step"] - parts["exchange"]], dtype=torch.float64)
    means = dict(zip(parts, workers.mean(list(parts.values())), strict=True))
    waiting = float(workers.max(own)) - (means["step"] - means["exchange"])
    return means, min(max(0.0, waiting), means["exchange"])


def _reported(estimates: Sequence[SpeedupEstimate]) -> list[SpeedupEstimate]:
    """Sort by kind; of the bucket sizes keep only the best, and only if it makes the step shorter."""
    buckets = [e for e in estimates if e.kind == "buckets"]
    best = [replace(e, kind="free") for e in buckets if e.speedup == max(x.speedup for x in buckets)][:1]
    others = [e for e in estimates if e.kind != "buckets"]
    kept = others + [e for e in best if e.speedup > _MIN_BUCKET_SPEEDUP]
    return sorted(kept, key=lambda e: _KINDS.index(e.kind))
