"""`AtLastBucket`: a DDP communication hook that averages all gradients after the last bucket of a backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..layers.names import own_name
from .job import find_ddp


class AtLastBucket:
    """State of the hook: collects the buckets of a backward pass and averages them when the last one arrives."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, torch.futures.Future[Tensor]]] = []

    def arrived(self, bucket: Any) -> None:
        """Called when a bucket arrives, while the backward pass continues."""

    def average(self, buckets: list[Any]) -> None:
        """Replace the gradients in the buckets by their means over the workers, in place."""
        raise NotImplementedError

    def take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """A future of the bucket's buffer with the averages."""
        if bucket.index() == 0:
            self._held.clear()  # left over if an earlier backward pass failed
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if device.type == "cpu" else [device]
        )
        self._held.append((bucket, future))
        self.arrived(bucket)
        if bucket.is_last():
            held, self._held = self._held, []
            self.average([b for b, _ in held])
            for b, averaged in held:
                averaged.set_result(b.buffer())
        return future


def register(ddp: DistributedDataParallel, state: AtLastBucket) -> None:
    """Register the hook with a DDP wrapper. A copy of the wrapper has none, and averages its gradients as plain DDP does."""
    ddp.register_comm_hook(state, _dispatch)
    ddp._comm_hooks = _NotCopied(ddp._comm_hooks)


class _NotCopied(list[Any]):
    """DDP's list of its hooks, empty in a copy: torch registers none with a copy, and process groups cannot be copied."""

    def __reduce__(self) -> Any:
        return list, ()


def _dispatch(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no other annotation than GradBucket
    return state.take(bucket)


def gradients_in(bucket: Any) -> list[tuple[Tensor, Tensor]]:
    """Parameters of a bucket with their gradients; those of complex parameters as pairs of real numbers (…, 2)."""
    parameters = bucket.parameters()
    if not parameters[0].is_complex():  # a bucket has one dtype
        return list(zip(parameters, bucket.gradients(), strict=True))
    # The buffer is real. torch's views of it count complex numbers, so they are half as long and in the wrong places.
    parts = bucket.buffer().split([2 * p.numel() for p in parameters])
    return [(p, part.view(*p.shape, 2)) for p, part in zip(parameters, parts, strict=True)]


def as_real(p: Tensor) -> Tensor:
    """A parameter in the form of its gradient in `gradients_in`.

    >>> as_real(torch.zeros(3, dtype=torch.complex64)).shape
    torch.Size([3, 2])
    """
    return torch.view_as_real(p.detach()) if p.is_complex() else p


def ddp_of(model: nn.Module, caller: str) -> DistributedDataParallel:
    """The DDP wrapper of a model. Raises TypeError, naming the calling function, if there is none."""
    ddp = find_ddp(model)
    if ddp is None:
        kind = type(model).__name__
        raise TypeError(f"{caller}: the {kind} is not wrapped in DistributedDataParallel; wrap it first")
    return ddp


def check_hookable(ddp: DistributedDataParallel, caller: str) -> None:
    """Raise ValueError if the DDP wrapper or its model does not support such a hook."""
    if ddp._comm_hooks:
        hook, state = ddp._comm_hooks[0][0], ddp._comm_hooks[0][1]
        ours = isinstance(state, AtLastBucket)
        name = type(state).__name__ if ours else getattr(hook, "__name__", "unknown")
        raise ValueError(
            f"{caller}: this DDP wrapper already has the communication hook {name}, and supports only one; wrap the "
            "model again"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError(
            f"{caller}: skip_all_reduce_unused_params skips buckets, which the hook must see; wrap without it"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            f'{caller}: DDP does not call hooks with torch._dynamo.config.optimize_ddp = "python_reducer"; '
            "choose another mode before wrapping"
        )
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{caller}: {own_name(name) or 'the model'} has sparse gradients; build it with sparse=False"
            )
