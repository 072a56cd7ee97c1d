"""A DDP communication hook that holds all gradients of a backward pass until it has averaged them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..layers.names import own_name
from .rewrap import find_ddp


class AtLastBucket:
    """Holds the buckets of a backward pass back until the last one has come and all gradients are averaged."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, torch.futures.Future[Tensor]]] = []

    def arrived(self, bucket: Any) -> None:
        """A bucket is there; the backward pass goes on."""

    def average(self, buckets: list[Any]) -> None:
        """Put the mean over the workers into the buckets."""
        raise NotImplementedError

    def take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The bucket's buffer, once it holds averages."""
        if bucket.index() == 0:
            self._held.clear()  # of a backward pass that broke off
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if device.type == "cpu" else [device]
        )
        self._held.append((bucket, future))
        self.arrived(bucket)
        if bucket.is_last():
            held, self._held = self._held, []
            self.average([b for b, _ in held])
            for b, waiting in held:
                waiting.set_result(b.buffer())
        return future


def register(ddp: DistributedDataParallel, state: AtLastBucket) -> None:
    ddp.register_comm_hook(state, _dispatch)
    if ddp.static_graph:
        ddp.register_forward_pre_hook(_refuse_unsynchronised_start)


def _refuse_unsynchronised_start(ddp: Any, inputs: Any) -> None:
    """Torch 2.11 and 2.13 would run the hook on such a pass and then fail an internal assertion, for good."""
    if torch.is_grad_enabled() and not (
        ddp.require_backward_grad_sync or ddp._static_graph_delay_allreduce_enqueued
    ):
        raise ValueError(
            "with static_graph=True the first pass after wrapping, and after a switch, cannot be under no_sync(): "
            "this torch would fail; run it with synchronisation, or wrap with static_graph=False"
        )


def _dispatch(state, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read annotations that are strings
    return state.take(bucket)


def wrapper(model: nn.Module, who: str) -> DistributedDataParallel:
    """The DDP around `model`, which `who` wants to hook."""
    ddp = find_ddp(model)
    if ddp is None:
        kind = type(model).__name__
        raise TypeError(f"{who}: a {kind} is not wrapped in DistributedDataParallel; wrap it first")
    return ddp


def refuse_hookless(ddp: DistributedDataParallel, who: str) -> None:
    """What no such hook can work with."""
    if ddp._comm_hooks:
        hook, state = ddp._comm_hooks[0][0], ddp._comm_hooks[0][1]
        ours = isinstance(state, AtLastBucket)
        name = type(state).__name__ if ours else getattr(hook, "__name__", "unknown")
        raise ValueError(
            f"{who}: this DDP has the communication hook {name} already and takes only one; wrap the model anew"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError(
            f"{who}: skip_all_reduce_unused_params leaves buckets out of the exchange; wrap without it"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            f'{who}: DDP runs without hooks under torch._dynamo.config.optimize_ddp = "python_reducer"; '
            "choose another mode before wrapping"
        )
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{who}: {own_name(name) or 'the model'} has sparse gradients; build it with sparse=False"
            )
