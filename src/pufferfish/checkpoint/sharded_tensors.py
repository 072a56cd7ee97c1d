"""Tensors sharded by FSDP2: each worker writes its own shard and reads the parts it needs from any file.

Supported are tensors that one mesh dimension shards and the others replicate: those of `fully_shard` on a 1-D
mesh, or on a 2-D mesh with replicas (HSDP).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .packing import ShardedTensorSpec

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a part of a tensor


def local_box(name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    """Return the part of a tensor of `shape` that this worker holds."""
    offset, size = [0] * len(shape), list(shape)
    shards = [(i, p) for i, p in enumerate(placements) if type(p) is not Replicate]
    if len(shards) > 1 or any(type(p) is not Shard for _, p in shards):
        raise ValueError(
            f"{name}: placements {placements} cannot be saved; use at most one Shard and otherwise Replicate"
        )
    for i, p in shards:
        assert isinstance(p, Shard)
        length = shape[p.dim]
        chunk = -(-length // mesh.size(i))  # as torch.chunk: the last chunk may be smaller, or empty
        offset[p.dim] = min(chunk * mesh.get_local_rank(i), length)
        size[p.dim] = min(chunk, length - offset[p.dim])
    return tuple(offset), tuple(size)


def local_shards(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the shards that this worker writes, and their offsets. One worker writes for all replicas."""
    shards, offsets = {}, {}
    for key, x in tensors.items():
        if not isinstance(x, DTensor):
            continue
        offset, _ = local_box(key, tuple(x.shape), x.device_mesh, x.placements)
        replicated = [i for i, p in enumerate(x.placements) if type(p) is Replicate]
        if all(x.device_mesh.get_local_rank(i) == 0 for i in replicated):
            shards[key], offsets[key] = x.to_local(), list(offset)
    return shards, offsets


def is_sharded(model: nn.Module) -> bool:
    """Whether the model has sharded parameters."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def unsharded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are not sharded."""
    return {name: x for name, x in tensors.items() if not isinstance(x, DTensor)}


class ShardReader:
    """Reads parts of sharded tensors from the files of a checkpoint, opening files in the given order."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._open: list[tuple[Any, dict[str, list[int]]]] = []

    def read(self, key: str, dtype: torch.dtype, part: Box) -> Tensor:
        """Return one part of a tensor, assembled from as many files as needed."""
        result = torch.empty(part[1], dtype=dtype)
        # Flags, not a count: replicas that are sharded over a 1-D mesh each write the same shards.
        missing = torch.ones(part[1], dtype=torch.bool)
        for file, offsets in self._opened():
            if not missing.any():
                break
            if key in offsets:
                shard = file.get_slice(key)
                offset, shape = offsets[key], shard.get_shape()
                starts = [max(a, b) for a, b in zip(offset, part[0], strict=True)]
                ends = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, *part, strict=True)]
                if all(a < b for a, b in zip(starts, ends, strict=True)):
                    source, target = _relative(offset, starts, ends), _relative(part[0], starts, ends)
                    if missing[target].any():
                        result[target] = shard[source] if source else file.get_tensor(key)
                        missing[target] = False
        if missing.any():
            raise ValueError(
                f"{key}: {int(missing.sum()):,} of {result.numel():,} values are missing from the checkpoint"
            )
        return result

    def _opened(self) -> Iterator[tuple[Any, dict[str, list[int]]]]:
        for i, path in enumerate(self._files):
            if i == len(self._open):
                file: Any = safe_open(path, "pt")
                self._open.append((file, json.loads(file.metadata()["offsets"])))
            yield self._open[i]


def _relative(offset: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(starts, ends, offset, strict=True))


def load_like(value: Any, like: Any, reader: ShardReader, prefix: str) -> Any:
    """Return saved tensors with the layout of `like`, which may be sharded differently or not at all.

    Args:
        value: a tensor, a `ShardedTensorSpec`, any other value, or a list, tuple or dict of these.
        prefix: prefix of the keys in the reader's files.
    """
    if isinstance(value, list | tuple):
        return type(value)(load_like(x, like, reader, prefix) for x in value)
    if isinstance(value, dict):
        return {key: load_like(x, like, reader, prefix) for key, x in value.items()}
    if not isinstance(value, Tensor | ShardedTensorSpec):
        return value
    shape = tuple(value.shape)
    if not isinstance(like, DTensor) or (isinstance(value, Tensor) and value.shape != like.shape):
        if isinstance(value, Tensor):
            return value
        return reader.read(prefix + value.key, value.dtype, ((0,) * len(shape), shape))
    mesh, placements = like.device_mesh, like.placements
    part = local_box(str(getattr(value, "key", "tensor")), shape, mesh, placements)
    if isinstance(value, ShardedTensorSpec):
        local = reader.read(prefix + value.key, value.dtype, part)
    else:
        local = value[tuple(slice(a, a + n) for a, n in zip(*part, strict=True))].clone()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.to(like.to_local().device),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
