"""`compress`: the communication hook that averages a DDP model's gradients by any method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from ..buckets import AtLastBucket, refuse_hookless, register, wrapper
from ..names import own_name
from ..optim import Optimizers, as_list
from ..ranks import Workers
from . import table
from .aggregator import Aggregator
from .batch import batches
from .casts import BFloat16
from .meter import Meter
from .table import Methods


def compress(
    model: nn.Module,
    method: Methods | None = None,
    *,
    optimizer: Optimizers = None,
    scaler: Any = None,
    memory: bool | None = None,
    scope: Literal["layer", "global"] = "layer",
    seed: int = 0,
    smallest: int = 1024,
    nonfinite: Literal["nan", "zero"] = "nan",
) -> Hook:
    """Average a DDP model's gradients with fewer bytes. Call it on all ranks, once; later `hook.use(method)`.

    The exchange starts when the backward pass is over. The hook stays through a `Switch`.

    Args:
        model: wrapped in DistributedDataParallel, compiled or not, without a communication hook so far.
        method: one method, or a mapping name pattern → method; `BFloat16()` by default.
        optimizer: under SGD a memory is in the units of the update: when the learning rate falls, what was left
            over at the old rate counts as much as it would have then. Other optimizers make no difference.
        scaler: a `GradScaler`, so that the memory follows its scale. Its scale is read in every step.
        memory, scope, seed, smallest, nonfinite: see `Aggregator`.

    >>> compress(nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: compress: a Linear is not wrapped in DistributedDataParallel; wrap it first
    """
    ddp = wrapper(model, "compress")
    workers = Workers(ddp.process_group, next(ddp.module.parameters()).device, "compress")

    def sound() -> Aggregator:
        _refuse(ddp)
        return Aggregator(
            BFloat16() if method is None else method, ddp.process_group,
            memory=memory, scope=scope, seed=seed, smallest=smallest, nonfinite=nonfinite,
        )  # fmt: skip

    hook = Hook(ddp.module, workers, workers.together(sound), optimizer, scaler)
    hook.use(hook.method, memory)
    register(ddp, hook)
    return hook


def _refuse(ddp: DistributedDataParallel) -> None:
    if ddp._comm_hooks and isinstance(ddp._comm_hooks[0][1], Hook):
        raise ValueError("compress: this DDP is compressed already; change its method by use() of that hook")
    refuse_hookless(ddp, "compress")


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

        Where the new one has a memory too, it goes on with the old one's; else that is sent with the next gradient.
        Whatever else the old one kept is dropped.
        """
        a = self.aggregator
        named = {own_name(name): p for name, p in self.module.named_parameters() if p.requires_grad}

        def sound() -> None:
            table.check(method, memory, a.scope)
            table.refuse_unmatched(method, named)
            for batch in batches(method, named, memory, a.scope, a.smallest):
                if batch.method.has_momentum:
                    self._refuse_momentum(type(batch.method).__name__, {n: named[n] for n in batch.names})

        self.workers.together(sound)
        facts = (method, memory, a.scope, a.seed, a.smallest, a.nonfinite, a.steps, list(named))
        self.workers.agree(
            repr(facts), 0, "the compression's method, settings or parameters; all must call it alike"
        )
        a.use(method, memory)

    def _refuse_momentum(self, method: str, compressed: Mapping[str, nn.Parameter]) -> None:
        """A method's own momentum and an optimizer's would multiply."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                with_momentum = group["params"] if group.get("momentum") or "betas" in group else []
                held = {id(p) for p in with_momentum}
                for name, p in compressed.items():
                    if id(p) in held:
                        raise ValueError(
                            f"{name}: {method} has a momentum of its own, and so has the "
                            f"{type(optimizer).__name__} for this parameter; give it an optimizer without"
                        )

    def average(self, buckets: list[Any]) -> None:
        """All gradients, in place. The parameters are looked up each time: a switch replaces them."""
        of = {
            id(p): _seen_as(p, g) for b in buckets for p, g in zip(b.parameters(), b.gradients(), strict=True)
        }
        params = {own_name(name): p for name, p in self.module.named_parameters() if id(p) in of}
        gradients = {name: of[id(p)] for name, p in params.items()}
        means = self.aggregator(gradients, self._units(params))
        torch._foreach_copy_(list(gradients.values()), [means[name] for name in gradients])

    def _units(self, params: Mapping[str, nn.Parameter]) -> dict[str, float]:
        """Loss scale over learning rate, of every parameter; nothing where neither is known."""
        sgd = [o for o in self.optimizers if isinstance(o, optim.SGD)]
        if not sgd and self.scaler is None:
            return {}
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        rates = {id(p): float(g["lr"]) for o in sgd for g in o.param_groups for p in g["params"]}
        return {name: scale / rate if (rate := rates.get(id(p), 1.0)) else 0.0 for name, p in params.items()}

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by parameter name. Each rank has a memory of its own: save it on all of them."""
        return self.aggregator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on all ranks. Another number of ranks starts with empty memories, with a warning."""
        self.aggregator.load_state_dict(state)


def _seen_as(p: Tensor, g: Tensor) -> Tensor:
    """A bucket's gradient with the strides of its parameter, such as channels-last, in which DDP has filled it."""
    dense = not p.is_contiguous() and torch.empty_like(p, device="meta").stride() == p.stride()
    return g.as_strided(p.shape, p.stride(), g.storage_offset()) if dense else g
