"""`compress`: average a model's gradients with fewer bytes; `DDPHook`: the communication hook that does it under DDP."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import FSDPModule

from ..distributed.ddp import (
    AtLastBucket,
    as_real,
    check_hookable,
    ddp_of,
    find_ddp,
    gradients_in,
    register_hook,
)
from ..distributed.workers import Workers
from ..layers import own_name
from ..layers.names import trainable_parameters
from ..lowrank.optimizers import Optimizers, as_list, check_optimizers
from .engine import Engine, Step, make_batches
from .exchange import Meter
from .fsdp2_hook import FSDP2Hook, compress_fsdp2, find_fsdp2_hook
from .method import Method
from .methods.changed import Changed
from .methods.sums import BFloat16
from .settings import Methods, Settings
from .sharded import ShardedHook, compress_sharded
from .state import check_format, updates_by_rate


def compress(
    model: nn.Module,
    method: Methods | None = None,
    *,
    parameters: Method | Changed | None = None,
    optimizer: Optimizers = None,
    replicas: dist.ProcessGroup | None = None,
    settings: Settings | None = None,
) -> DDPHook | FSDP2Hook | ShardedHook:
    """Average a model's gradients with fewer bytes. Call it on all workers, once.

    `hook.use` changes the method, except for a model sharded over all machines. The hook remains after a `Switch`; a
    deep copy of the wrapper is plain DDP. Gradients of complex parameters are sent as pairs of real numbers (DDP only).

    Args:
        model: Wrapped in DistributedDataParallel, compiled or not, without a communication hook; or sharded by FSDP2 over
            all machines (see `compress_sharded`), or inside each of the `replicas` (see `compress_fsdp2`).
        method: One, or a mapping name pattern → method; default `BFloat16()`, sharded over all machines `BlockInt8()`.
        parameters: How FSDP2 gathers parameters between machines: `Changed()` by default, which loses nothing.
        optimizer: One or several that train the model. When the learning rate of SGD changes, error feedback, which is in
            gradient units, is rescaled; not for others and for subclasses with their own `step` (LARS).
        replicas: For FSDP2: process group of the workers that hold the same shard.
        settings: What only experts change: error feedback, hierarchy, seed, a `GradScaler` and others; without the method.

    >>> compress(nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: compress: the Linear is not wrapped in DistributedDataParallel; wrap it first
    """
    given = settings or Settings()

    def with_method() -> Settings:
        if given.method is not None:
            raise ValueError("compress: pass the method as the second argument, not in settings=")
        return replace(given, method=BFloat16() if method is None else method)

    sharded = any(isinstance(m, FSDPModule) for m in model.modules())
    if sharded:
        check_optimizer(model, optimizer)
        if replicas is None:
            return compress_sharded(model, method, parameters, given)
    if parameters is not None:
        raise ValueError(
            "compress: parameters= is for a model that FSDP2 shards over all machines, without replicas=; leave it out"
        )
    if sharded:
        return compress_fsdp2(model, with_method, replicas, optimizer=optimizer)
    if replicas is not None:
        raise ValueError("compress: replicas= is for models sharded by FSDP2; leave it out for a DDP model")
    ddp = ddp_of(model, "compress")
    workers = Workers(ddp.process_group, next(ddp.module.parameters()).device, "compress")
    named = trainable_parameters(ddp.module)

    def checked() -> Settings:
        check_optimizer(ddp.module, optimizer)
        if find_hook(ddp) is not None:
            raise ValueError(
                "compress: this DDP model is already compressed; call use() of its hook to change the method"
            )
        check_hookable(ddp, "compress")
        return checked_settings(with_method(), named, as_list(optimizer))

    chosen = workers.run_on_all(checked)
    # Before groups are made: making one waits for all its workers.
    local = os.environ.get("LOCAL_WORLD_SIZE") if given.hierarchy == "node" else None
    about = "method, LOCAL_WORLD_SIZE, parameters or other settings; make the same call on all workers"
    workers.agree(repr((chosen, local, list(named))), 0, about)
    engine = workers.run_on_all(lambda: Engine(chosen, ddp.process_group))
    hook = DDPHook(ddp.module, workers, engine, optimizer)
    register_hook(ddp, hook)
    return hook


def check_optimizer(model: nn.Module, optimizer: Optimizers) -> None:
    """Raise if an optimizer trains another model, or if it is not an optimizer."""
    optimizers = check_optimizers(optimizer)
    parameters = {id(p) for p in model.parameters()}
    for o in optimizers:
        if not any(id(p) in parameters for group in o.param_groups for p in group["params"]):
            raise ValueError(
                f"compress: the {type(o).__name__} holds none of this model's parameters; pass the one that trains it"
            )


def find_hook(model: nn.Module) -> DDPHook | FSDP2Hook | None:
    """The hook that compresses this model's gradients, if there is one.

    >>> find_hook(nn.Linear(2, 2))
    """
    ddp = find_ddp(model)
    state = ddp._comm_hooks[0][1] if ddp is not None and ddp._comm_hooks else None
    return state if isinstance(state, DDPHook) else find_fsdp2_hook(model)


class DDPHook(AtLastBucket):
    """Compression of a DDP model, made by `compress`: change its method, read its meter, save its state."""

    def __init__(
        self,
        module: nn.Module,  # not the wrapper, which holds this hook: through C++ such a cycle is never freed
        workers: Workers,
        engine: Engine,
        optimizer: Optimizers,
    ) -> None:
        super().__init__()
        self.module, self.workers, self.engine = module, workers, engine
        self.optimizers = as_list(optimizer)
        self._by_rate = [o for o in self.optimizers if updates_by_rate(o)]
        self._step: Step | None = None  # the exchange of this backward pass
        self._arrived: dict[str, Tensor] = {}  # its gradients so far
        self._names: dict[int, str] = {}  # id of each parameter in the buckets → name; empty: to be arranged
        self._strided: set[int] = set()  # ids of those with another element order, such as channels-last
        self._parameters: list[weakref.ref[Tensor]] = []  # those that the ids belong to

    @property
    def method(self) -> Methods:
        """The current method or methods."""
        method = self.engine.settings.method
        assert method is not None
        return method

    @property
    def meter(self) -> Meter:
        """Bytes and times so far."""
        return self.engine.meter

    def use(self, method: Methods, error_feedback: bool | None = None) -> None:
        """Change the method from the next backward pass on. Call it on all workers.

        What the old method has not sent becomes error feedback of the new one, or, if the new one has none, is sent with
        the next gradient. Other state of the old method is dropped.
        """
        self.workers.operation = "hook.use"
        named, before = trainable_parameters(self.module), self.engine.settings
        settings = self.workers.run_on_all(
            lambda: checked_settings(
                replace(before, method=method, error_feedback=error_feedback), named, self.optimizers
            )
        )
        about = "the compression's method, settings or parameters; make the same call on all workers"
        self.workers.agree(repr((settings, self.engine.steps, list(named))), 0, about)
        self.engine.use(settings)
        self._names = {}

    def arrived(self, bucket: Any) -> None:
        """Start to send what is complete, if that is allowed before the end of the backward pass."""
        if bucket.index() == 0:
            self._step, self._arrived = None, {}
            parameters = list(self.module.parameters())
            if len(parameters) != len(self._parameters) or any(
                ref() is not p for ref, p in zip(self._parameters, parameters, strict=True)
            ):  # the first pass, or a switch has replaced some
                self._parameters, self._names = [weakref.ref(p) for p in parameters], {}
            if self._names and self.engine.overlap_bytes is not None:
                self._step = self._begin(self._names)
        if self._step is not None:
            gradients = self._gradients([bucket], self._names)
            self._arrived |= gradients
            self._step.add(gradients)

    def average(self, buckets: list[Any]) -> None:
        """Average all gradients in place."""
        if self._step is None:
            names = self._names or self._find_names(buckets)
            self._arrived = self._gradients(buckets, names)
            if not self._names:
                self.engine.arrange(
                    {name: self._arrived[name] for name in names.values()}, self.engine.overlap_bytes
                )
            self._step = self._begin(names)
            self._names = names  # only now: after an error all is arranged again
            self._step.add(self._arrived)
        self._step.finish(self._arrived)
        self._step.commit()
        self._step, self._arrived = None, {}

    def _begin(self, names: Mapping[int, str]) -> Step:
        """Start a step. Units are read only where something is kept in them: reading a scaler waits for the device."""
        if self.engine.keeps_units or self.engine.state.has_error:
            return self.engine.begin(*gradient_units(names, self._by_rate, self.engine.settings.scaler))
        return self.engine.begin()

    def _find_names(self, buckets: list[Any]) -> dict[int, str]:
        """Names of all parameters in the buckets, by id, in the model's order."""
        held = {id(p): p for b in buckets for p in b.parameters()}
        self._strided = {i for i, p in held.items() if _is_strided(p)}
        return {id(p): own_name(n) for n, p in self.module.named_parameters() if id(p) in held}

    def _gradients(self, buckets: list[Any], names: Mapping[int, str]) -> dict[str, Tensor]:
        """Gradients by name, with the strides of their parameters, in which DDP fills the buckets."""
        found: dict[str, Tensor] = {}
        for b in buckets:
            for p, g in gradients_in(b):
                if id(p) in self._strided:
                    like = as_real(p)
                    g = g.as_strided(like.shape, like.stride(), g.storage_offset())
                found[names[id(p)]] = g
        return found

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by parameter name. Every worker has its own error feedback: save it on all workers."""
        return self.engine.state_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `state` was not saved by such a hook. Changes nothing."""
        check_format(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, on all workers. With another number of workers, error feedback starts empty.

        A state that has none of this model's parameters raises ValueError.
        """
        shapes = {own_name(name): as_real(p).shape for name, p in self.module.named_parameters()}
        self.engine.load_state_dict(state, shapes)
        self._names = {}


def checked_settings(
    settings: Settings, named: Mapping[str, nn.Parameter], optimizers: Sequence[optim.Optimizer]
) -> Settings:
    """`settings`, checked against the model's parameters and the optimizers."""
    settings.check_patterns(named)
    batches = make_batches(settings, {name: as_real(p) for name, p in named.items()})
    for batch in batches:
        if batch.policy.has_momentum:
            _refuse_momentum(type(batch.policy).__name__, {n: named[n] for n in batch.names}, optimizers)
    settings.warn_unused({batch.policy for batch in batches}, stacklevel=7)
    return settings


def _refuse_momentum(
    method: str, compressed: Mapping[str, nn.Parameter], optimizers: Sequence[optim.Optimizer]
) -> None:
    """Raise ValueError if an optimizer's momentum would multiply that of a method."""
    if not optimizers:
        warnings.warn(
            f"{method} has its own momentum, which an optimizer's momentum would multiply; pass optimizer= to compress to "
            "have that checked",
            stacklevel=7,
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            with_momentum = group["params"] if group.get("momentum") or "betas" in group else []
            held = {id(p) for p in with_momentum}
            for name, p in compressed.items():
                if id(p) in held:
                    raise ValueError(
                        f"{name}: {method} has its own momentum, and so does the {type(optimizer).__name__} of this "
                        "parameter; turn one off, for example by momentum=0"
                    )


def gradient_units(
    names: Mapping[int, str], by_rate: Sequence[optim.Optimizer], scaler: Any = None
) -> tuple[dict[str, float], float]:
    """Loss scale over learning rate of each parameter (`names`: by id), and the loss scale. A rate of 0 gives 0: unknown.

    `by_rate`: the optimizers whose rates count; see `updates_by_rate`.

    >>> p = nn.Parameter(torch.ones(1))
    >>> gradient_units({id(p): "w"}, [optim.SGD([p], lr=0.5)])
    ({'w': 2.0}, 1.0)
    """
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    if scaler is None and not by_rate:
        return {}, scale
    rates = {id(p): float(group["lr"]) for o in by_rate for group in o.param_groups for p in group["params"]}
    return {name: scale / rate if (rate := rates.get(i, 1.0)) else 0.0 for i, name in names.items()}, scale


def _is_strided(p: Tensor) -> bool:
    """Whether p is dense in memory, but in another order of its elements."""
    return not p.is_contiguous() and torch.empty_like(p, device="meta").stride() == p.stride()
