"""`Job`: a model with its wrappers and its workers; the DDP wrapper is initialized again after a change; gradient hooks."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..layers import inside, named_modules, own_name, unwrap
from ..layers.base import CALL_HOOKS
from ..planning import Entry, matrix_spectrum
from .workers import Workers, workers_text

T = TypeVar("T")

# Arguments of DDP that can be read back from its attributes; newer ones are read if this torch has them.
_ARGUMENTS = (
    "device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "gradient_as_bucket_view",
    "static_graph", "mixed_precision", "skip_all_reduce_unused_params", "batched_grad_copy",
)  # fmt: skip


class Job:
    """A model as it is trained: the model inside its wrappers, the DDP wrapper, and the workers that train it.

    Attributes:
        model: as passed, with its wrappers.
        inner: the model without wrappers.
        layers: its modules that are not wrappers, by their own names.
        dense: the model that plans are made for; same as `inner` unless the model is sharded.
        ddp: the DDP wrapper, or None.
        sharded: whether the parameters are FSDP2 shards.
        workers: the workers of the DDP or sharded model, or a single process.
        facts: text of the names, types and shapes, which must be equal on all workers.

    Args:
        caller: the feature that errors name, such as "switch.step".
        group: the workers, where the loop averages gradients itself and the model has no wrapper that knows them.
    """

    def __init__(
        self, model: nn.Module, caller: str = "switch", group: dist.ProcessGroup | None = None
    ) -> None:
        self.model = model
        reshard(model)
        self.ddp, self.inner = find_ddp(model), unwrap(model)
        self.layers = {name: module for name, _, module in named_modules(model)}
        first = next(self.inner.parameters())
        self.sharded = isinstance(first, DTensor)
        if self.ddp is not None or self.sharded:
            if group is not None:
                raise ValueError(
                    f"{caller}: group= is for models without a wrapper; DDP and FSDP2 have their own group"
                )
            group = self.ddp.process_group if self.ddp else dist.group.WORLD
        # Offloaded shards are not on the device of their collectives.
        device = torch.device(first.device_mesh.device_type) if isinstance(first, DTensor) else first.device
        self.workers = Workers(group, device, caller)
        if self.workers.rank < 0:
            raise ValueError(
                f"{caller}: this worker is not in the group that was passed; call it on those that are"
            )
        types = [(name, type(module).__name__) for name, module in self.layers.items()]
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.inner.named_parameters()]
        self.facts = repr((types, shapes))

    def warn_without_group(self) -> None:
        """Warn if this process is one of several and nothing says whether they train this model together."""
        if (
            self.workers.group is None
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size() > 1
        ):
            warnings.warn(
                f"{self.workers.operation}: the job has {dist.get_world_size()} workers, but the model has no DDP wrapper, so "
                "nothing is compared or broadcast, and each worker computes its own factors; if all train this model, pass "
                "group=dist.group.WORLD",
                stacklevel=5,
            )

    @property
    def dense(self) -> nn.Module:
        return self.inner

    def own_spectra(
        self, weights: list[tuple[Entry, nn.Parameter]], owner: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """Singular values of the matrices that this worker owns."""
        return {e.name: matrix_spectrum(e, w) for e, w in weights if owner[e.name] == self.workers.rank}

    def check(self, check: Callable[[nn.Module], None]) -> None:
        """Run `check` with `dense` on all workers, and give parameters that differ the values of worker 0, with a warning."""
        compare = self.workers.size > 1 and not self.sharded
        parameters = {own_name(name): p for name, p in self.inner.named_parameters()} if compare else {}

        def checked() -> list[int]:
            check_rewrap(self.ddp)
            own = _checksums(parameters.values())
            check(self.dense)
            return own

        sums = self.workers.gather(checked)
        columns = zip(*sums, strict=True)
        differ = [name for name, column in zip(parameters, columns, strict=True) if len(set(column)) > 1]
        if differ:
            others = workers_text([worker for worker, bits in enumerate(sums) if bits != sums[0]])
            warnings.warn(
                f"{self.workers.operation}: {_some(differ)} differ on {others} from worker 0, whose values all workers have now; "
                "only gradients are averaged, so find what changes parameters on some workers only",
                stacklevel=4,
            )
            with torch.no_grad():
                for p in (parameters[name] for name in differ):
                    p.copy_(self.workers.broadcast_tensor(p.detach().to(self.workers.device).contiguous(), 0))


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper: the model itself, or the one inside `torch.compile`, an AveragedModel or Fabric's wrapper."""
    while (inner := inside(model)) is not None:
        model = inner
    if any(kind.__module__ == "torchft.ddp" for kind in type(model).__mro__):
        raise TypeError(
            "torchft's DistributedDataParallel is not supported: it has no process group; pass the model without it, and "
            "average gradients by pufferfish.integrations.torchft.ElasticGradients, or models by ElasticLocalSteps"
        )
    return model if isinstance(model, DistributedDataParallel) else None


def reshard(model: nn.Module) -> None:
    """Make the parameters of an FSDP2 model shards again where a forward pass has left them gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _checksums(parameters: Iterable[Tensor]) -> list[int]:
    """A number for each parameter that depends on all its bits: their sum as integers, in one pass on the device."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in parameters]
    return [int(p.view(ints[p.itemsize]).sum(dtype=torch.int64)) for p in real]


def _some(names: list[str]) -> str:
    """
    >>> _some(["a"]), _some(["a", "b", "c", "d"])
    ('a', 'a, b, c and 1 more')
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_rewrap(ddp: DistributedDataParallel | None) -> None:
    """Raise ValueError if an argument of the DDP wrapper cannot be read back."""
    if ddp is not None and ddp._delay_all_reduce_params:
        raise ValueError(
            "DDP does not store its argument delay_all_reduce_named_params, so the wrapper cannot be changed; "
            "change its module, and wrap that again"
        )


def rewrap_(ddp: DistributedDataParallel, undo: ExitStack) -> None:
    """Run the wrapper's constructor again on the same object, with the arguments it was created with.

    Training loops, trainers and compiled graphs keep their reference to the wrapper. Nothing is synchronized: all
    workers hold the same parameters already, and buffers may differ between them.
    """
    own: dict[str, Any] = {name: getattr(ddp, name) for name in _ARGUMENTS if hasattr(ddp, name)}
    if hasattr(ddp, "forward_sync_buffers"):
        own["forward_sync_buffers"] = ddp.forward_sync_buffers
    else:
        own["broadcast_buffers"] = ddp.broadcast_buffers
    cap = ddp.bucket_bytes_cap / 2**20
    before, after = map(_gradient_bytes, (ddp._module_parameters, ddp.module.parameters()))
    if not ddp.bucket_bytes_cap_default:
        own["bucket_cap_mb"] = cap
    elif after < before:  # as many buckets as before: a single one would not overlap with the backward pass
        own["bucket_cap_mb"] = max(1.0, cap * after / before)
    kind = type(ddp._comm_hooks)  # ours is not copied with the wrapper
    hooks = list(ddp._comm_hooks) if ddp.mixed_precision is None else []
    # Inside of `ddp.join()`, `_join_config` says that other workers may have run out of data.
    attributes = {k: vars(ddp)[k] for k in (*CALL_HOOKS, "training", "_join_config") if k in vars(ddp)}
    undo.callback(vars(ddp).update, dict(vars(ddp)))  # after the next one
    undo.callback(vars(ddp).clear)
    DistributedDataParallel.__init__(ddp, ddp.module, init_sync=False, **own)
    vars(ddp).update(attributes)
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    ddp._comm_hooks = kind(ddp._comm_hooks)


def _gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters if p.requires_grad)


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


def register_hook(ddp: DistributedDataParallel, state: AtLastBucket) -> None:
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
