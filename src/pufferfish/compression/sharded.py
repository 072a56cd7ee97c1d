"""`ShardedHook`: FSDP2's gathers of parameters and reductions of gradients, with fewer bytes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from ..distributed.workers import Workers, workers_text
from .exchange import Group, Meter, Transport
from .fsdp2_hook import group_of, layout_of, sharded_modules
from .method import Method, StepContext
from .methods.changed import Changed, Counts, as_integers, decode, encode, sizes
from .methods.quantized import BlockInt8, Blocks, Int4
from .methods.sums import BFloat16, NoCompression
from .settings import Settings

#: What compresses gradients, and what compresses parameters.
GRADIENTS = (BlockInt8, Int4, BFloat16, NoCompression)
PARAMETERS = (Changed, BlockInt8, BFloat16, NoCompression)
#: Bytes of the header in front of what changed, 8 integers: tag, base, and the four counts of the code.
HEADER = 64
#: Gathers of a module from one comparison of the workers' held copies to the next.
_CHECK_EVERY = 64
# by its name in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def compress_sharded(model: nn.Module, method: Any, parameters: Any, settings: Settings) -> ShardedHook:
    """Compress what FSDP2 sends between the workers of the mesh dimension it shards over. Call it on all workers, once.

    Each gather of a module's parameters and each reduction of its gradients stays one message. Gradients are sent
    to their owners by an all-to-all and added up there in fp32, without error feedback. On a mesh (replicate, shard)
    FSDP2's own all-reduce between replicas stays as it is, and so do the gathers inside a machine by an integer
    `reshard_after_forward`.

    Args:
        model: Sharded by `fully_shard` over one dimension of a mesh, compiled or not.
        method: Of the gradients: `BlockInt8`, `Int4` or `BFloat16`; `NoCompression` leaves FSDP2's reduction. None: `BlockInt8()`.
        parameters: `Changed`, without loss; `BlockInt8` or `BFloat16`, which round what all workers compute with;
            `NoCompression`. None: `Changed()`.
        settings: The defaults; there is no error feedback or order of messages to set.

    >>> compress_sharded(nn.Linear(2, 2), None, None, Settings())
    Traceback (most recent call last):
    TypeError: compress: a Linear is not sharded; apply fully_shard first, with a 1-D mesh
    """
    if settings != Settings():
        raise ValueError(
            "compress: a model that is sharded over all machines takes no settings; they are for replicas="
        )
    hook = ShardedHook(
        BlockInt8() if method is None else method, Changed() if parameters is None else parameters
    )
    hook.attach(model)
    return hook


def find_sharded_hook(model: nn.Module) -> ShardedHook | None:
    """The hook that compresses what FSDP2 sends for this model, if there is one.

    >>> find_sharded_hook(nn.Linear(2, 2))
    """
    for module in model.modules():
        group = group_of(module) if isinstance(module, FSDPModule) else None
        if group is not None and isinstance(group._all_gather_comm, ParameterGather):
            return group._all_gather_comm.hook
    return None


class ShardedHook:
    """Compression of what FSDP2 sends for a model, made by `compress`: read its meter, attach it to a rebuilt model.

    Its methods are fixed: unlike the other hooks it has no `use`; start the job again with
    others. It has no state to save: what was gathered last is gathered again after a restart.

    Attributes:
        method: That of the gradients.
        parameters: That of the parameters.
        meter: Bytes and times so far; a step is a backward pass. `plain_wire_bytes` are those of the same gathers and
            reductions without compression, in FSDP2's dtypes.
        names: The sharded modules.
    """

    def __init__(self, method: Method, parameters: Method | Changed) -> None:
        self.method, self.parameters, self.meter = method, parameters, Meter()
        self.names: list[str] = []
        self._in_pass = False

    def attach(self, model: nn.Module) -> None:
        """Compress what is sent for this model, the first one or a rebuilt one. Call it on all workers."""
        modules, mesh = sharded_modules(model, native_replicas=True)
        group = _shard_group(next(iter(modules.values())))
        workers = Workers(group, torch.device(mesh.device_type), "compress")

        def checked() -> None:
            for what, given, known in (
                ("the gradients", self.method, GRADIENTS),
                ("parameters=", self.parameters, PARAMETERS),
            ):
                if type(given) not in known:
                    names = ", ".join(f"{kind.__name__}()" for kind in known)
                    raise TypeError(
                        f"compress: {given!r} is not for {what} of a sharded model; choose from {names}"
                    )
            if mesh.size() != dist.get_world_size():
                raise ValueError(
                    f"compress: the model is sharded over {mesh.size()} of {dist.get_world_size()} workers; pass the "
                    'workers that hold the same shard as replicas=mesh["replicate"].get_group()'
                )
            present = find_sharded_hook(model)
            if present is not None and present is not self:
                raise ValueError("compress: what is sent for this sharded model is already compressed")

        workers.run_on_all(checked)
        facts = repr((self.method, self.parameters, {n: layout_of(group_of(m)) for n, m in modules.items()}))
        workers.agree(
            facts, 0, "the compression's methods or sharded modules; make the same call on all workers"
        )
        self.names = list(modules)
        for number, module in enumerate(modules.values()):
            module.set_custom_all_gather(ParameterGather(self, number, group))
            module.set_custom_reduce_scatter(GradientScatter(self, number))

    def state_dict(self) -> dict[str, Any]:
        """Nothing; so that a loop may save it like the other hooks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def count_step(self) -> None:
        """Count a backward pass, at the first of its reductions."""
        if not self._in_pass:
            self._in_pass = True
            Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._in_pass = False
        self.meter.steps += 1


class _Collective:
    """What FSDP2 asks of a collective of its own: memory, and the call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input and output of FSDP2's call."""
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(eq=False)
class ParameterGather(_Collective):
    """The all-gather of one sharded module's parameters."""

    hook: ShardedHook
    number: int  # of the module
    group: dist.ProcessGroup  # of the whole mesh dimension; others are inside a machine
    held: Tensor | None = None  # what was gathered last, (workers, elements) as integers; None: nothing
    gathers: int = 0
    expected: Expected = field(default_factory=lambda: Expected())  # defined below

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather `input_tensor`, which lies in `output_tensor`. It waits: FSDP2 never does for what is no torch `Work`."""
        hook, method = self.hook, self.hook.parameters
        transport = Group(group, hook.meter)
        transport.operation = f"the gather of the parameters of {hook.names[self.number]}"
        rows = output_tensor.view(transport.size, -1)
        everywhere = group.group_name == self.group.group_name
        hook.meter.plain_wire_bytes += input_tensor.nbytes * (transport.size - 1)
        with hook.meter.working():
            if isinstance(method, Changed) and everywhere:
                as_integers(rows).copy_(self._gather_changed(as_integers(input_tensor), transport))
                return
            coder: Method = NoCompression()
            if everywhere and rows.is_floating_point() and isinstance(method, Method):
                coder = method
            n = len(input_tensor)
            sent = to_bytes(coder, input_tensor)
            for row, received in zip(rows, transport.gather(sent)(), strict=True):
                row.copy_(from_bytes(coder, received, n, rows.dtype))

    def _gather_changed(self, mine: Tensor, transport: Transport) -> Tensor:
        """All workers' shards, each changed from the last one where its worker says so."""
        held, self.held = self.held, None  # after an error nothing is held
        if held is not None and held.shape[1:] != mine.shape:
            held = None
        counts, code = ((0, 0, 0, 0), mine[:0]) if held is None else encode(mine, held[transport.worker])
        size = self.expected.size(mine.nbytes)
        headers, received = self._exchange(self._base(held), counts, code.view(torch.uint8), size, transport)
        self.gathers += 1
        bases = {base for _, base, *_ in headers}
        if held is None or len(bases) > 1:
            if 0 not in bases:
                warnings.warn(
                    f"{transport.operation}: the workers' held copies differ, and are gathered again",
                    stacklevel=2,
                )
            shards = transport.gather(mine.view(torch.uint8))()
            self.held = torch.stack([shard.view(mine.dtype) for shard in shards])
            return self.held
        lengths = [sum(sizes(their, mine)) for _, _, *their in headers]
        if max(lengths) > size:
            rest = _padded(code.view(torch.uint8)[size:], max(lengths) - size)
            more = transport.gather(rest)()
            received = [torch.cat(parts) for parts in zip(received, more, strict=True)]
        for worker, (shard, (_, _, *their), data) in enumerate(zip(held, headers, received, strict=True)):
            if worker == transport.worker:
                shard.copy_(mine)
            else:
                decode(their, data, shard)
        self.expected.note(max(lengths))
        self.held = held
        return held

    def _exchange(
        self, base: int, counts: Counts, code: Tensor, size: int, transport: Transport
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Send header and code in one message with room for `size` bytes of code; return those of all workers."""
        tag = self.number << 40 | self.gathers
        header = torch.zeros(HEADER // 8, dtype=torch.int64)
        header[:6] = torch.tensor([tag, base, *counts])
        message = torch.cat([header.view(torch.uint8).to(code.device), _padded(code[:size], size)])
        received = transport.gather(message)()
        headers = torch.stack([theirs[:HEADER].view(torch.int64) for theirs in received])[:, :6].tolist()
        self._check_tags([header[0] for header in headers])
        return headers, [theirs[HEADER:] for theirs in received]

    def _check_tags(self, tags: list[int]) -> None:
        """Raise RuntimeError, on all workers, if they gather different modules or have not gathered equally often."""
        if len(set(tags)) == 1:
            return
        places: dict[int, list[int]] = {}
        for worker, tag in enumerate(tags):
            places.setdefault(tag, []).append(worker)
        found = "; ".join(
            f"{workers_text(workers)} in gather {tag % (1 << 40)} of {self.hook.names[tag >> 40]}"
            for tag, workers in places.items()
        )
        raise RuntimeError(f"the workers are out of step: {found}; every worker must make the same calls")

    def _base(self, held: Tensor | None) -> int:
        """What the code is relative to: 0 for nothing, 1 for the held copy, and now and then its sum, to find a corrupt one."""
        if held is None:
            return 0
        return 1 if self.gathers % _CHECK_EVERY else 2 + int(held.sum(dtype=torch.int64)) % 2**62


@dataclass
class Expected:
    """How many bytes of changes to make room for in a message, from what all workers know of the last ones.

    Changes are expected after as many gathers without any as last time: 1 if each forward gather finds some and each
    backward gather none.

    >>> expected = Expected()
    >>> for length in (6400, 0, 6400, 0):
    ...     expected.note(length)
    >>> expected.size(1_000_000)
    6848
    """

    last: int = 0  # bytes of the last changes, on the worker that had most
    quiet: int = 0  # gathers without changes since
    quiet_before: int = 0  # the same, between the last two with changes

    def size(self, most: int) -> int:
        """Bytes to make room for, a multiple of 64; `most`: those of the whole shard."""
        room = min(self.last + self.last // 16, most) if self.quiet == self.quiet_before else 0
        return -(-room // 64) * 64

    def note(self, length: int) -> None:
        """Note the bytes of the changes that a gather found."""
        if length:
            self.last, self.quiet_before, self.quiet = length, self.quiet, 0
        else:
            self.quiet += 1


@dataclass(eq=False)
class GradientScatter(_Collective):
    """The reduce-scatter of one sharded module's gradients: an all-to-all, and a sum at the owner of each shard."""

    hook: ShardedHook
    number: int  # of the module

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor`, one shard for each worker, to this worker's shard."""
        hook, method = self.hook, self.hook.method
        transport = Group(group, hook.meter)
        transport.operation = f"the reduction of the gradients of {hook.names[self.number]}"
        hook.count_step()
        hook.meter.gradient_bytes += input_tensor.nbytes
        hook.meter.plain_wire_bytes += input_tensor.nbytes * (1 - 1 / transport.size)
        if isinstance(method, NoCompression):
            # Counted as an efficient reduction; that of gloo sends twice as much.
            hook.meter.sent("all_to_all", input_tensor.nbytes, transport.size)
            with hook.meter.working(), hook.meter.waiting():
                _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        with hook.meter.working():
            n = len(output_tensor)
            sent = [to_bytes(method, shard) for shard in input_tensor.view(transport.size, n)]
            total = torch.zeros(n, device=output_tensor.device)
            for received in transport.scatter(sent)():
                total += from_bytes(method, received, n, torch.float32)
            if op == dist.ReduceOp.AVG:
                total /= transport.size
            elif op == dist.ReduceOp.PREMUL_SUM:  # of `set_gradient_divide_factor`
                total *= op.__getstate__()[1]
            elif op != dist.ReduceOp.SUM:
                raise ValueError(f"compress: gradients cannot be reduced by {op}")
            output_tensor.copy_(total)


def to_bytes(method: Method, x: Tensor) -> Tensor:
    """Encode a flat tensor as bytes.

    >>> to_bytes(BlockInt8(2), torch.tensor([127.0, -1.0])).tolist()
    [127, 255, 0, 0, 128, 63]
    """
    if isinstance(method, Blocks):
        n = len(x)
        wide = x.new_empty((1, 1, method.shard(n, 1)), dtype=torch.float32)
        wide[..., :n] = x
        wide[..., n:] = 0
        parts = method.encode(wide, n, torch.empty_like(wide), _context(x))
        return torch.cat([part.view(-1).view(torch.uint8) for part in parts])
    x = x.bfloat16() if isinstance(method, BFloat16) else x
    return x.contiguous().view(torch.uint8)


def from_bytes(method: Method, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Decode a flat tensor of n elements, `dtype` if it was not encoded.

    >>> from_bytes(BlockInt8(2), to_bytes(BlockInt8(2), torch.tensor([127.0, -1.0])), 2, torch.float32)
    tensor([127.,  -1.])
    """
    if isinstance(method, Blocks):
        wide = data.new_empty((1, 1, method.shard(n, 1)), dtype=torch.float32)
        blocks = method.cut(wide).shape[-2]
        codes, scales = data.split([len(data) - 4 * blocks, 4 * blocks])
        if scales.storage_offset() % 4:
            scales = scales.clone()
        decoded = method.decode((codes.view(1, 1, -1), scales.view(torch.float32).view(1, 1, -1)), wide)
        return decoded.view(-1)[:n]
    return data.view(torch.bfloat16 if isinstance(method, BFloat16) else dtype)


def _context(x: Tensor) -> StepContext:
    """What a method may know; block formats only take memory from it."""

    def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=x.device)

    return StepContext(worker=0, size=1, step=0, names=(), device=x.device, empty=empty)


def _padded(data: Tensor, size: int) -> Tensor:
    """The first bytes of a message of `size` bytes."""
    return torch.nn.functional.pad(data, (0, size - len(data)))


def _shard_group(module: Any) -> dist.ProcessGroup:
    """The workers that hold the shards of a module."""
    p = group_of(module).fsdp_params[0].sharded_param
    (dimension,) = (i for i, placement in enumerate(p.placements) if isinstance(placement, Shard))
    group: dist.ProcessGroup = p.device_mesh.get_group(dimension)
    return group
