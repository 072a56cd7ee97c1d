"""`diagnose`: around the steps of a user's own loop; then says what they cost here and what would pay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..compression import BlockInt8, PowerSGD, TopK
from ..compression.ddp_hook import Hook
from ..compression.method import Method
from ..compression.settings import Methods
from ..distributed.bucket_hook import AtLastBucket
from ..distributed.rewrap import find_ddp
from ..distributed.workers import Workers
from ..layers.names import unwrap
from ..optim.carry import Optimizers
from ..planning.plan import Plan
from ..planning.profile import autocast, entered
from .breakdown import Breakdown
from .cost_model import CostModel, Work
from .diagnosis import Diagnosis
from .dry_run import dry_run
from .gradient_times import Ready
from .link import Link
from .low_rank_shapes import planned, shapes
from .probe import probe
from .ranking import Choice, Ranking, wire
from .remedies import Job, Remedy, gradients, message_bytes, plain

METHODS: tuple[Method, ...] = (BlockInt8(), TopK(0.01), PowerSGD(rank=4))
_COMPUTING = ("data", "forward", "backward", "encode", "decode", "optimizer")
_FIRST = 3  # steps that are not like the others
_KINDS = ("free", "low rank", "compression", "both")
_WORTH = 1.005  # a bucket size that brings less is not told


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
    """Time the steps of your own loop that run in the block; when it is left, say what would make them shorter.

    Use it on all ranks. Model, gradients, optimizer, random numbers and hooks are afterwards as they were. Computing that
    was slowed down by messages of a CPU beside it is taken as it would be without them, as far as a probe can tell.

    Args:
        model: the one the loop calls: plain, DDP, with `compress`, compiled.
        optimizer: whose steps count; by default those of all that hold parameters of the model.
        steps: timed at most, after three that are not; what runs on in the block costs nothing.
        total_steps: of the whole run, for hours.
        methods: of compression, to be tried.
        measure: time all layers dense and low-rank, instead of taking time for MACs. Layers that get slower stay dense.
        show: print it, on rank 0.

    >>> model = nn.Sequential(nn.Linear(256, 256))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with diagnose(model, steps=5, show=False) as found:
    ...     for _ in range(5):
    ...         model(torch.ones(8, 256)).sum().backward()
    ...         optimizer.step()
    >>> found.workers, [choice.kind for choice in found.choices]
    (1, ['low rank'])
    """
    _refuse(model)
    if steps < 1 or (total_steps is not None and total_steps < 1):
        raise ValueError(f"diagnose: steps={steps}, total_steps={total_steps}: they must be 1 or more")
    found = Diagnosis()
    watched = _Watched(model, optimizer, steps)
    with Ready(unwrap(model)) as ready, watched:
        yield found
    workers = Workers(watched.ddp.process_group if watched.ddp else None, watched.device, "diagnose")
    _fill(found, workers, watched, ready, methods, measure, total_steps)
    if show and workers.rank == 0:
        print(found, flush=True)


def _refuse(model: nn.Module) -> None:
    """What exchanges in ways that cannot be seen from here."""
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise TypeError(
            "diagnose: FSDP2 exchanges inside of forward and backward and cannot be told from them; give a DDP model"
        )
    ddp = find_ddp(model)
    if ddp is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise TypeError(
            f"diagnose: a {type(model).__name__} is not wrapped in DistributedDataParallel; "
            f"wrap it first, as there are {dist.get_world_size()} processes"
        )
    for hook, state in ddp._comm_hooks if ddp is not None else ():
        if not isinstance(state, Hook):
            name = type(state).__name__ if isinstance(state, AtLastBucket) else getattr(hook, "__name__", "")
            raise ValueError(
                f"diagnose: nobody knows what the communication hook {name} of this DDP sends; wrap without it, or "
                "with pf.compress"
            )


class _Watched(Breakdown):
    """Leaves out the first steps, stops after enough of them, and remembers how the model was called."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, most: int) -> None:
        super().__init__(model, optimizer)
        self.most = most
        self.ended = 0
        self.call: Any = None
        self.autocast: torch.dtype | None = None  # that it was called in

    def __exit__(self, kind: object, *_: object) -> None:
        if self._handles:  # else enough was seen before
            super().__exit__(kind)

    def _close(self) -> None:
        self.ended += self._stepped
        super()._close()

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        super()._before_forward(model, args, kwargs)
        if self.call is None and torch.is_grad_enabled():
            self.call = shapes(unwrap(model), args, kwargs)
            self.autocast = autocast(self.device)
        if self.ended == _FIRST and self._count + len(self._waiting) == _FIRST:
            self._drop()
        elif self.ended == _FIRST + self.most and self._handles:
            self._detach()
            self.read()

    def _drop(self) -> None:
        self._waiting.clear()
        self._begin()


def _fill(
    found: Diagnosis,
    workers: Workers,
    watched: _Watched,
    ready: Ready,
    methods: Sequence[Method],
    measure: bool,
    total_steps: int | None,
) -> None:
    """All ranks come here together; what goes wrong on one of them stops all before they wait for each other."""
    model, size = unwrap(watched.model), workers.size

    def looked() -> str:
        if not watched.steps:
            raise ValueError(
                "diagnose: no step of the model's optimizer ended in the block; nothing was timed"
            )
        with entered(watched.autocast, watched.device):
            made, note = planned(model, watched.call, measure)
        return json.dumps([made.to_json(), note, ready.curve()])

    text, note, curve = json.loads(workers.tell(workers.together(looked)))

    found.workers, found.steps = size, watched.steps
    found.parts, found.waiting = _over_ranks(watched.parts, workers)
    if size > 1:
        found.link = probe(workers.group, watched.device, largest=message_bytes(model))
    costs = CostModel(link=found.link or Link.of(bandwidth=1e12, latency=0, size=1))

    def tried() -> tuple[Job, list[Remedy]]:
        seen = replace(_work(watched, size), ready=tuple(map(tuple, curve)))
        job = Job(model, costs.undisturbed(seen), size, _method(watched), Plan.from_json(text), note)
        return job, list(job.remedies(methods))

    job, offered = workers.together(tried)
    found.wire_bytes = wire(job.work, size)
    seconds = found.parts["step"]
    found.hours = seconds * total_steps / 3600 if total_steps else None
    ranking = Ranking(
        costs=costs, now=_mean(job.work, workers), size=size, waiting=found.waiting, hours=found.hours
    )
    found.predicted = ranking.step(ranking.now)
    found.ceiling = seconds / (seconds - found.exposed + found.waiting)

    def choice(remedy: Remedy) -> Choice:
        warm_up = remedy.warm_up and _mean(remedy.warm_up, workers)
        return ranking.choice(replace(remedy, work=_mean(remedy.work, workers), warm_up=warm_up))

    choices = [choice(remedy) for remedy in offered]
    alone = [(c.speedup, r) for c, r in zip(choices, offered, strict=True) if r.method is not None]
    if alone and job.plan.ranks:  # equal speed-ups on all ranks, so that all try the same pair
        best = max(alone, key=lambda pair: pair[0])[1]
        choices.append(choice(workers.together(lambda: job.pair(best))))
    found.choices = _told(choices)


def _work(watched: _Watched, size: int) -> Work:
    """The step as it is."""
    p, method = watched.parts, _method(watched)
    computing: dict[str, Any] = {name: max(0.0, p[name]) for name in _COMPUTING}
    work = Work(**computing)
    if size == 1 or watched.ddp is None:
        return work
    if method is not None:
        sent = dry_run(method, gradients(unwrap(watched.model)), size, steps=1)
        return replace(
            plain(work, gradients(unwrap(watched.model))), messages=sent.messages, overlaps=sent.overlaps
        )
    told = watched.ddp._get_ddp_logging_data()
    sizes = str(told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes")).split(",")
    handed = tuple(map(int, sizes))
    return replace(work, messages=tuple(("all_reduce", n) for n in handed), overlaps=True, handed=handed)


def _method(watched: _Watched) -> Methods | None:
    hooks = watched.ddp._comm_hooks if watched.ddp is not None else []
    return hooks[0][1].method if hooks and isinstance(hooks[0][1], Hook) else None


def _mean(work: Work, workers: Workers) -> Work:
    """Of all ranks' computing."""
    values = _means([getattr(work, name) for name in _COMPUTING], workers)
    computing: dict[str, Any] = dict(zip(_COMPUTING, values, strict=True))
    return replace(work, **computing)


def _means(values: Sequence[float], workers: Workers) -> list[float]:
    if workers.size == 1:
        return list(values)
    mean = torch.tensor(values, dtype=torch.float64, device=workers.device) / workers.size
    dist.all_reduce(mean, group=workers.group)
    return [float(x) for x in mean.cpu()]


def _over_ranks(parts: dict[str, float], workers: Workers) -> tuple[dict[str, float], float]:
    """Means, and how long the mean worker waits for the one that computes longest."""
    own = torch.tensor([parts["step"] - parts["exchange"]], dtype=torch.float64)
    means = dict(zip(parts, _means(list(parts.values()), workers), strict=True))
    waiting = float(workers.largest(own)) - (means["step"] - means["exchange"])
    return means, min(max(0.0, waiting), means["exchange"])


def _told(choices: Sequence[Choice]) -> list[Choice]:
    """In their order; of the bucket sizes only the best, and that only if it brings something."""
    sizes = [c for c in choices if c.kind == "buckets"]
    best = [replace(c, kind="free") for c in sizes if c.speedup == max(x.speedup for x in sizes)][:1]
    kept = [c for c in choices if c.kind != "buckets"] + [c for c in best if c.speedup > _WORTH]
    return sorted(kept, key=lambda c: _KINDS.index(c.kind))
