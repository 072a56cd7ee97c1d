"""`compress`: the communication hook that averages a DDP model's gradients by any method."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..distributed.bucket_hook import AtLastBucket, refuse_hookless, register, wrapper
from ..distributed.rewrap import find_ddp
from ..distributed.workers import Workers
from ..layers.names import own_name
from ..optim.carry import Optimizers, as_list, check
from . import settings as table
from .aggregator import Aggregator, Levels
from .batch import batches
from .fsdp2_hook import ShardedHook, attached, compress_sharded
from .meter import Meter
from .methods.casts import BFloat16
from .settings import Methods
from .step import Step


def compress(
    model: nn.Module,
    method: Methods | None = None,
    *,
    optimizer: Optimizers = None,
    scaler: Any = None,
    memory: bool | None = None,
    scope: Literal["layer", "global"] = "layer",
    exchange: str | None = None,
    levels: Levels = "flat",
    seed: int = 0,
    smallest: int = 1024,
    nonfinite: Literal["nan", "zero"] = "nan",
    overlap: bool | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> Hook | ShardedHook:
    """Average a DDP model's gradients with fewer bytes. Call it on all ranks, once; later `hook.use(method)`.

    The hook stays through a `Switch`. Results depend neither on DDP's buckets nor on restarts: messages are laid out
    by parameter name.

    Args:
        model: wrapped in DistributedDataParallel, compiled or not, without a communication hook so far; or sharded by
            FSDP2 inside of each of the `replicas` (see `compress_sharded`).
        method: one method, or a mapping name pattern → method; `BFloat16()` by default.
        optimizer: under SGD a memory is in the units of the update: when the learning rate falls, what was left
            over at the old rate counts as much as it would have then. Other optimizers make no difference.
        scaler: a `GradScaler`, so that the memory follows its scale, which is read in every step while there is a memory.
        memory, scope, exchange, levels, seed, smallest, nonfinite: see `Aggregator`.
        overlap: True: pieces of 25 MiB, the first of 1, go out while the backward pass goes on, the further rounds of
            methods that have some after it. False: all goes out after it, in the fewest messages. None: True for plain
            and 16-bit averages.
        replicas: for FSDP2: the ranks that hold the same shard.

    >>> compress(nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: compress: a Linear is not wrapped in DistributedDataParallel; wrap it first
    """
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        if (scope, levels, smallest, overlap) != ("layer", "flat", 1024, None):
            raise ValueError(
                "compress: scope, levels, smallest and overlap are for DDP; shards of FSDP2 have no layers, go out one by "
                "one and are averaged inside a replica already"
            )
        check_given(model, optimizer, scaler)
        return compress_sharded(
            model, method, replicas,
            optimizer=optimizer, scaler=scaler, memory=memory, exchange=exchange, seed=seed, nonfinite=nonfinite,
        )  # fmt: skip
    if replicas is not None:
        raise ValueError("compress: replicas= is for models sharded by FSDP2; a DDP model knows its group")
    ddp = wrapper(model, "compress")
    workers = Workers(ddp.process_group, next(ddp.module.parameters()).device, "compress")

    def sound() -> Aggregator:
        return Aggregator(
            BFloat16() if method is None else method, ddp.process_group,
            memory=memory, scope=scope, exchange=exchange, levels=levels, seed=seed, smallest=smallest,
            nonfinite=nonfinite, overlap=overlap,
        )  # fmt: skip

    workers.together(lambda: _refuse(ddp, optimizer, scaler))
    # Before groups are made: making one waits for all its ranks.
    machine = os.environ.get("LOCAL_WORLD_SIZE") if levels == "node" else None
    where = levels if isinstance(levels, str) else "groups"
    facts = (method, memory, scope, exchange, where, machine, seed, smallest, nonfinite, overlap)
    workers.agree(repr(facts), 0, "method, LOCAL_WORLD_SIZE or other settings; all must call it alike")
    hook = Hook(ddp.module, workers, workers.together(sound), optimizer, scaler)
    hook.use(hook.method, memory)
    register(ddp, hook)
    return hook


def _refuse(ddp: DistributedDataParallel, optimizer: Optimizers, scaler: Any) -> None:
    check_given(ddp.module, optimizer, scaler)
    if compressor_of(ddp) is not None:
        raise ValueError("compress: this DDP is compressed already; change its method by use() of that hook")
    refuse_hookless(ddp, "compress")


def check_given(model: nn.Module, optimizer: Optimizers, scaler: Any) -> None:
    """Refuse an optimizer that trains something else, and what is no optimizer or scaler."""
    if optimizer is not None and not isinstance(optimizer, optim.Optimizer | Iterable):
        raise TypeError(f"compress: optimizer is a {type(optimizer).__name__}, not an optimizer")
    optimizers = as_list(optimizer)
    check(optimizers)
    mine = {id(p) for p in model.parameters()}
    for o in optimizers:
        if not any(id(p) in mine for group in o.param_groups for p in group["params"]):
            raise ValueError(
                f"compress: the {type(o).__name__} holds none of this model's parameters; give the one that trains it"
            )
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(f"compress: scaler is a {type(scaler).__name__}, not a GradScaler")


def compressor_of(model: nn.Module) -> Hook | ShardedHook | None:
    """What compresses this model's gradients, if something does.

    >>> compressor_of(nn.Linear(2, 2))
    """
    ddp = find_ddp(model)
    state = ddp._comm_hooks[0][1] if ddp is not None and ddp._comm_hooks else None
    return state if isinstance(state, Hook) else attached(model)


class Hook(AtLastBucket):
    """A DDP model's compression, made by `compress`: change its method, read its meter, save its state."""

    def __init__(
        self,
        module: nn.Module,  # not the wrapper, which holds this: through C++ no such cycle is ever freed
        workers: Workers,
        aggregator: Aggregator,
        optimizer: Optimizers,
        scaler: Any,
    ) -> None:
        super().__init__()
        self.module, self.workers, self.aggregator = module, workers, aggregator
        self.optimizers = as_list(optimizer)
        self.scaler = scaler
        self._step: Step | None = None  # under way
        self._places: list[dict[str, Tensor]] = []  # the gradients that came in it
        self._names: dict[int, str] = {}  # of the parameters in the buckets, by id, once all is arranged
        self._turned: set[int] = set()  # those whose elements lie in another order, such as channels-last
        self._params: list[weakref.ref[Tensor]] = []  # whose ids those are

    def __repr__(self) -> str:
        return f"Hook({self.method!r}, {self.aggregator.steps} steps)"

    @property
    def method(self) -> Methods:
        """The present one."""
        return self.aggregator.method

    @property
    def meter(self) -> Meter:
        """What was sent so far."""
        return self.aggregator.meter

    def use(self, method: Methods, memory: bool | None = None) -> None:
        """Another method from the next backward pass on. Call it on all ranks.

        What the old one has not sent stays in the new one's memory, or is sent with the next gradient where it has
        none. Whatever else the old one kept is dropped.
        """
        a = self.aggregator
        named = {own_name(name): p for name, p in self.module.named_parameters() if p.requires_grad}

        def sound() -> None:
            table.check(method, memory, a.scope, a.exchange)
            table.refuse_unmatched(method, named)
            found = batches(method, named, memory, a.scope, a.smallest)
            for batch in found:
                if batch.method.has_momentum:
                    self._refuse_momentum(type(batch.method).__name__, {n: named[n] for n in batch.names})
            table.warn_of_idle(method, {batch.method for batch in found}, a.smallest)

        self.workers.together(sound)
        inside = a.nodes.size if a.nodes else 1
        facts = (
            method, memory, a.scope, a.exchange, a.overlap, inside, a.seed, a.smallest, a.nonfinite, a.steps,
            list(named),
        )  # fmt: skip
        self.workers.agree(
            repr(facts), 0, "the compression's method, settings or parameters; all must call it alike"
        )
        a.use(method, memory)
        self._names = {}  # the next pass arranges all anew

    def _refuse_momentum(self, method: str, compressed: Mapping[str, nn.Parameter]) -> None:
        """A method's own momentum and an optimizer's would multiply."""
        if not self.optimizers:
            warnings.warn(
                f"{method} has a momentum of its own, and an optimizer's would multiply it; give compress optimizer= to "
                "have that checked",
                stacklevel=5,
            )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                with_momentum = group["params"] if group.get("momentum") or "betas" in group else []
                held = {id(p) for p in with_momentum}
                for name, p in compressed.items():
                    if id(p) in held:
                        raise ValueError(
                            f"{name}: {method} has a momentum of its own, and so has the "
                            f"{type(optimizer).__name__} for this parameter; take it out there, such as by momentum=0"
                        )

    def arrived(self, bucket: Any) -> None:
        """Start what is complete, if it may start before the backward pass is over and the parameters are known."""
        if bucket.index() == 0:
            params = list(self.module.parameters())
            known = len(params) == len(self._params) and all(
                ref() is p for ref, p in zip(self._params, params, strict=True)
            )
            if not known:  # the first pass, or a switch has replaced some
                self._params, self._names = [weakref.ref(p) for p in params], {}
            early = bool(self._names) and self.aggregator.overlap_bytes is not None
            self._step = self.aggregator.begin(None, *self._units(self._names)) if early else None
            self._places = []
        if self._step is not None:
            self._places.append(self._gradients([bucket], self._names))
            self._step.add(self._places[-1:])

    def average(self, buckets: list[Any]) -> None:
        """All gradients, in place."""
        if self._step is None:
            names = self._names or self._found(buckets)
            gradients = self._gradients(buckets, names)
            like = None if self._names else {name: gradients[name] for name in names.values()}
            self._step = self.aggregator.begin(like, *self._units(names))
            self._names, self._places = names, [gradients]  # only now: what was refused is asked about again
            self._step.add(self._places)
        self._step.finish([{name: g for some in self._places for name, g in some.items()}])
        self._step, self._places = None, []

    def _found(self, buckets: list[Any]) -> dict[int, str]:
        """The names of all parameters in the buckets, in the model's order."""
        held = {id(p): p for b in buckets for p in b.parameters()}
        self._turned = {i for i, p in held.items() if _turned(p)}
        return {id(p): own_name(n) for n, p in self.module.named_parameters() if id(p) in held}

    def _gradients(self, buckets: list[Any], names: Mapping[int, str]) -> dict[str, Tensor]:
        """By name, with the strides of their parameters, in which DDP has filled the buckets."""
        found: dict[str, Tensor] = {}
        for b in buckets:
            for p, g in zip(b.parameters(), b.gradients(), strict=True):
                turned = id(p) in self._turned
                found[names[id(p)]] = g.as_strided(p.shape, p.stride(), g.storage_offset()) if turned else g
        return found

    def _units(self, names: Mapping[int, str]) -> tuple[dict[str, float], float]:
        """And the loss scale. Read only where they count: to ask a scaler is to wait for the device."""
        if not self.aggregator.remembers:
            return {}, 1.0
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        known = self.scaler is not None or any(isinstance(o, optim.SGD) for o in self.optimizers)
        return units(names, self.optimizers, scale) if known else {}, scale

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by parameter name. Each rank has a memory of its own: save it on all of them."""
        return self.aggregator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on all ranks. Another number of ranks starts with empty memories, with a warning.

        A state that knows none of this model's parameters is refused.
        """
        shapes = {own_name(name): p.shape for name, p in self.module.named_parameters()}
        self.aggregator.kept.load_state_dict(state, shapes)
        self._names = {}  # the next pass arranges all anew


def _turned(p: Tensor) -> bool:
    """Whether it fills its memory, but in another order."""
    return not p.is_contiguous() and torch.empty_like(p, device="meta").stride() == p.stride()


def units(
    names: Mapping[int, str], optimizers: Sequence[optim.Optimizer], scale: float = 1.0
) -> dict[str, float]:
    """Loss scale over learning rate for each parameter (`names`: by id). Only SGD's rates count.

    >>> p = nn.Parameter(torch.ones(1))
    >>> units({id(p): "w"}, [optim.SGD([p], lr=0.5)])
    {'w': 2.0}
    """
    sgd = [o for o in optimizers if isinstance(o, optim.SGD)]
    rates = {id(p): float(g["lr"]) for o in sgd for g in o.param_groups for p in g["params"]}
    return {name: scale / rate if (rate := rates.get(i, 1.0)) else 0.0 for i, name in names.items()}
