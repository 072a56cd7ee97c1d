"""Tensors in shards (FSDP2): every rank writes its piece, and reads what it needs from whoever wrote it.

One dimension of a tensor may be cut along one dimension of the mesh, and copied along the others: what
`fully_shard` makes on a 1-D mesh, and with replicas on a 2-D one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .packing import Shards

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a piece


def box(name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    """Which part of the whole this rank holds."""
    offset, size = [0] * len(shape), list(shape)
    cuts = [(i, p) for i, p in enumerate(placements) if type(p) is not Replicate]
    if len(cuts) > 1 or any(type(p) is not Shard for _, p in cuts):
        raise ValueError(
            f"{name}: placed as {placements}; one Shard, and Replicate along other dimensions, can be saved"
        )
    for i, p in cuts:
        assert isinstance(p, Shard)
        whole = shape[p.dim]
        part = -(-whole // mesh.size(i))  # as torch.chunk cuts: the last may be smaller, or empty
        offset[p.dim] = min(part * mesh.get_local_rank(i), whole)
        size[p.dim] = min(part, whole - offset[p.dim])
    return tuple(offset), tuple(size)


def own_pieces(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """This rank's pieces of those tensors that are in shards, and their offsets. Replicas have one writer."""
    pieces, offsets = {}, {}
    for key, x in tensors.items():
        if not isinstance(x, DTensor):
            continue
        offset, _ = box(key, tuple(x.shape), x.device_mesh, x.placements)
        copies = [i for i, p in enumerate(x.placements) if type(p) is Replicate]
        if all(x.device_mesh.get_local_rank(i) == 0 for i in copies):
            pieces[key], offsets[key] = x.to_local(), list(offset)
    return pieces, offsets


class Pieces:
    """The shards in a checkpoint's files, of which our own is looked at first."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._open: list[tuple[Any, dict[str, list[int]]]] = []

    def read(self, key: str, dtype: torch.dtype, wanted: Box) -> Tensor:
        """One part of the whole tensor, from as many files as it takes."""
        made = torch.empty(wanted[1], dtype=dtype)
        left = made.numel()
        for file, offsets in self._opened():
            if left == 0:
                break
            if key in offsets:
                piece = file.get_slice(key)
                offset, shape = offsets[key], piece.get_shape()
                starts = [max(a, b) for a, b in zip(offset, wanted[0], strict=True)]
                ends = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, *wanted, strict=True)]
                if all(a < b for a, b in zip(starts, ends, strict=True)):
                    here, there = _within(offset, starts, ends), _within(wanted[0], starts, ends)
                    made[there] = piece[here] if here else file.get_tensor(key)
                    left -= made[there].numel()
        if left:
            raise ValueError(f"{key}: {left:,} of {made.numel():,} values are in none of the files")
        return made

    def _opened(self) -> Iterator[tuple[Any, dict[str, list[int]]]]:
        for i, path in enumerate(self._files):
            if i == len(self._open):
                file: Any = safe_open(path, "pt")
                self._open.append((file, json.loads(file.metadata()["offsets"])))
            yield self._open[i]


def _within(offset: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(starts, ends, offset, strict=True))


def placed(value: Any, like: Any, pieces: Pieces, prefix: str) -> Any:
    """A saved tensor, whole or in shards, laid out as `like` is: whole or in shards, perhaps other ones."""
    if isinstance(value, list | tuple):
        return type(value)(placed(x, like, pieces, prefix) for x in value)
    if isinstance(value, dict):
        return {key: placed(x, like, pieces, prefix) for key, x in value.items()}
    if not isinstance(value, Tensor | Shards):
        return value
    shape = tuple(value.shape)
    if not isinstance(like, DTensor) or (isinstance(value, Tensor) and value.shape != like.shape):
        if isinstance(value, Tensor):
            return value
        return pieces.read(prefix + value.key, value.dtype, ((0,) * len(shape), shape))
    mesh, placements = like.device_mesh, like.placements
    if isinstance(value, Shards) and shape != tuple(like.shape):  # Adafactor's rows and columns
        if len(value.dims) != mesh.ndim:
            raise ValueError(
                f"{value.key}: the mesh had {len(value.dims)} dimensions, now it has {mesh.ndim}"
            )
        placements = tuple(Replicate() if dim is None else Shard(dim) for dim in value.dims)
    part = box(str(getattr(value, "key", "tensor")), shape, mesh, placements)
    if isinstance(value, Shards):
        local = pieces.read(prefix + value.key, value.dtype, part)
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
