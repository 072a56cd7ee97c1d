"""The files of one checkpoint: every worker writes its own, and reads and checks them against its model.

Nested state becomes JSON and tensors, and comes back exactly, without pickle.

A tensor sharded by FSDP2 is in the files of several workers: each writes its own shard, and reads the parts that it needs from
any file. At most one mesh dimension may shard it, and the others replicate it: `fully_shard` on a 1-D mesh, or on a 2-D mesh
with replicas (HSDP).
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..layers import local_part, own_keys, own_name
from ..lowrank.by_name import check_optimizer, group_names, names_by_id
from ..planning import Plan, read_json, write_text
from ..planning.json_file import file_record, sync
from .folder import read_manifest

_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_TENSOR_TYPES = (Tensor, nn.Parameter, DTensor)
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a part of a tensor


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of `model` with names that do not depend on wrappers."""
    state = model.state_dict()
    return {own: state[key] for key, own in own_keys(state).items()}


def differing_state(model: nn.Module, model_per_worker: bool) -> dict[str, Any]:
    """Return what differs between workers in the state of `model`, except for shards: its buffers, or all of it."""
    state, buffers = model.state_dict(), {own_name(name) for name, _ in model.named_buffers()}
    # Even DDP does not keep buffers equal: it broadcasts them before the forward pass that changes them.
    kept = {own: key for key, own in own_keys(state).items() if model_per_worker or own_name(key) in buffers}
    return _unsharded({own: state[key] for own, key in kept.items()})


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of `model_state`."""
    model.load_state_dict({key: state[own] for key, own in own_keys(model.state_dict()).items()})


def is_sharded(model: nn.Module) -> bool:
    """Whether the model has sharded parameters."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def write_files(
    folder: Path, worker: int, job_states: Mapping[str, Any], worker_state: dict[str, Any]
) -> dict[str, Any]:
    """Write this worker's files into `folder`.

    Args:
        job_states: state of the whole job, one file each. Worker 0 writes it, except for shards.
        worker_state: state of this worker alone, written together with its shards.

    Returns:
        Manifest entry of each file, by file name.
    """
    own_file = _worker_file(worker)
    tree, tensors = pack(worker_state, own_file)
    offsets: dict[str, list[int]] = {}
    files = []
    for name, state in job_states.items():
        job_tree, job_tensors = pack(state, name)
        shards, shard_offsets = _local_shards({f"{name}:{key}": x for key, x in job_tensors.items()})
        tensors |= shards
        offsets |= shard_offsets
        if worker == 0:
            files += _write(folder / name, job_tree, _unsharded(job_tensors))
    files += _write(folder / own_file, tree, tensors, {"offsets": json.dumps(offsets)})
    for file in files:
        sync(file)
    return {file.name: file_record(file) for file in files}


def _worker_file(worker: int) -> str:
    return f"rank-{worker:05d}"


def _local_shards(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the shards that this worker writes, and their offsets. One worker writes for all replicas."""
    shards, offsets = {}, {}
    for key, x in tensors.items():
        if not isinstance(x, DTensor):
            continue
        offset, _ = _local_box(key, tuple(x.shape), x.device_mesh, x.placements)
        replicated = [i for i, p in enumerate(x.placements) if type(p) is Replicate]
        if all(x.device_mesh.get_local_rank(i) == 0 for i in replicated):
            shards[key], offsets[key] = x.to_local(), list(offset)
    return shards, offsets


def _local_box(name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
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


def _unsharded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are not sharded."""
    return {name: x for name, x in tensors.items() if not isinstance(x, DTensor)}


def _write(
    path: Path, tree: Any, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> list[Path]:
    text, binary = path.with_suffix(".json"), path.with_suffix(".safetensors")
    write_text(text, json.dumps(tree, allow_nan=False) + "\n")
    try:
        save_file(storable(tensors), binary, {"format": "pt"} | (metadata or {}))
    except SafetensorError as error:
        raise OSError(f"{binary}: {error}") from None
    shutil.copymode(text, binary)  # safetensors makes files readable by their owner only, whatever the umask
    return [text, binary]


class SavedCheckpoint:
    """A checkpoint as worker `worker` of `world_size` reads it.

    Args:
        path: folder of the checkpoint.
        model: state that was saved from another device than the CPU is loaded to the device of this model.
        digest: digest of the manifest that worker 0 has read; another one raises ValueError.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module | None = None,
        *,
        digest: str = "",
        worker: int = 0,
        world_size: int = 1,
    ) -> None:
        manifest = read_manifest(path, contents=False)
        if digest and manifest["sha256"] != digest:
            raise ValueError(
                f"{path}: differs from the checkpoint that worker 0 reads; all workers must share the folder"
            )
        self.path = path
        self._device = next((p.device for p in model.parameters()), None) if model else None
        self.world_size: int = manifest["world"]
        self.training: dict[str, Any] = self._read("training")
        self.ranks: dict[str, dict[str, int]] = self.training["ranks"]
        plan = self.training["plan"]
        self.plan = None if plan is None else Plan.from_json(plan)
        self._worker = worker
        #: Whether every worker finds a state of its own.
        self.same_workers = world_size == self.world_size
        order = sorted(range(self.world_size), key=lambda w: w != worker)  # this worker's file first
        self._shards = ShardReader([path / f"{_worker_file(w)}.safetensors" for w in order])

    def worker_state(self) -> dict[str, Any]:
        """Return the state of this worker alone; if the world size has changed, only worker 0's compressor state.

        A compressor loads what its workers shared of that.
        """
        state = self._read(_worker_file(self._worker if self.same_workers else 0), self._device)
        compressor = {"compressor": state["parts"]["compressor"]}
        return state if self.same_workers else {"buffers": {}, "parts": compressor}

    def not_restored(self, passed: Mapping[str, Any], saved: Mapping[str, Any], world_size: int) -> list[str]:
        """Return the parts that are not restored, with the reason.

        These are parts that were not saved or not passed and, when the world size changed, all state of single
        workers; a compressor then still restores the state that its workers shared.

        Args:
            passed: parts of the job by name; None where the user passed none.
            saved: their saved states by name.
        """
        lost: dict[str, str] = {}
        reset = []
        if not self.same_workers:
            by = f"{self.world_size} worker{'s' * (self.world_size > 1)}"
            feedback = "error feedback of the compressor"
            if getattr(passed["compressor"], "has_model_per_worker", False):
                feedback = f"models and optimizers of all workers but worker 0, and {feedback}"
            own = {"compressor": feedback, "data": "data"}
            lost = {name: text for name, text in own.items() if passed[name] is not None or name == "data"}
            said = [text for name, text in lost.items() if passed[name] is not None]
            reset = [f"{text} (saved by {by}, now {world_size})" for text in ("random numbers", *said)]
        for name in (passed.keys() | saved.keys()) - lost.keys():
            was_saved, was_passed = saved.get(name) is not None, passed.get(name) is not None
            if was_saved != was_passed:
                reset.append(f"{name} ({'not passed' if was_saved else 'not saved'})")
        return sorted(reset)

    def weights(self, file: str, model: nn.Module) -> dict[str, Any]:
        """Return a saved model's tensors by name, in the layout of `model`; ValueError if they do not fit."""
        saved, current = self._read(file), model_state(model)
        for name in [*current, *saved]:
            if name not in saved:
                raise ValueError(f"{name} is in the model, but was not saved")
            if name not in current:
                raise ValueError(f"{name} was saved, but is not in the model")
            a, b = _describe(saved[name]), _describe(current[name])
            if a != b:
                raise ValueError(f"{name} was saved as {a}, but is {b} in the model")
        return {name: _load_like(x, current[name], self._shards, f"{file}:") for name, x in saved.items()}

    def optimizer_states(
        self, model: nn.Module, optimizers: Sequence[optim.Optimizer], class_names: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return the saved optimizer states; ValueError if they do not fit.

        Args:
            optimizers: their parameter groups, of `model`, are compared with the saved ones.
            class_names: class of each optimizer that will load the state.
        """
        states, names = self._read("optimizer", self._device), names_by_id(model)
        if len(states) != len(optimizers):
            raise ValueError(
                f"saved with {len(states)} optimizers, now {len(optimizers)}; pass the same number"
            )
        parameters = {own_name(name): p for name, p in model.named_parameters()}
        for state, optimizer, class_name in zip(states, optimizers, class_names, strict=True):
            check_optimizer(state, class_name, group_names(optimizer, names))
            for name, values in state["state"].items():
                for key, value in values.items():
                    values[key] = _load_like(value, parameters[name], self._shards, "optimizer:")
        return list(states)

    def _read(self, name: str, device: torch.device | None = None) -> Any:
        text = self.path / f"{name}.json"
        return unpack(read_json(text), load_file(text.with_suffix(".safetensors")), device)


def _describe(x: Any) -> str:
    """Return shape and dtype of a tensor, or the type of another value."""
    if not isinstance(x, Tensor | ShardedTensorSpec):
        return type(x).__name__
    return f"{'×'.join(map(str, x.shape)) or 'a scalar'} {str(x.dtype).removeprefix('torch.')}"


def _load_like(value: Any, like: Any, reader: ShardReader, prefix: str) -> Any:
    """Return saved tensors with the layout of `like`, which may be sharded differently or not at all.

    Args:
        value: a tensor, a `ShardedTensorSpec`, any other value, or a list, tuple or dict of these.
        prefix: prefix of the keys in the reader's files.
    """
    if isinstance(value, list | tuple):
        return type(value)(_load_like(x, like, reader, prefix) for x in value)
    if isinstance(value, dict):
        return {key: _load_like(x, like, reader, prefix) for key, x in value.items()}
    if not isinstance(value, Tensor | ShardedTensorSpec):
        return value
    shape = tuple(value.shape)
    if not isinstance(like, DTensor) or (isinstance(value, Tensor) and value.shape != like.shape):
        if isinstance(value, Tensor):
            return value
        return reader.read(prefix + value.key, value.dtype, ((0,) * len(shape), shape))
    mesh, placements = like.device_mesh, like.placements
    part = _local_box(str(getattr(value, "key", "tensor")), shape, mesh, placements)
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


def pack(state: Any, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Split `state` into a tree for JSON and the tensors that the tree refers to by key.

    State consists of dicts, lists, tuples, None, bools, numbers, strings and tensors. A tensor that occurs
    twice is stored once; a sharded one is unpacked as a `ShardedTensorSpec`.

    Args:
        name: name of the state, for error messages.

    Raises:
        TypeError: for any other type, with the path to the value.

    >>> tree, tensors = pack({"lr": 0.1, "betas": (0.9, 0.99), "m": torch.zeros(2)})
    >>> tree
    {'dict': {'lr': 0.1, 'betas': {'tuple': [0.9, 0.99]}, 'm': {'tensor': 'm'}}}
    >>> unpack(tree, tensors)
    {'lr': 0.1, 'betas': (0.9, 0.99), 'm': tensor([0., 0.])}
    """
    packer = _Packer(name)
    return packer.walk(state, ""), packer.tensors


class _Packer:  # a class, not nested functions: those would keep the tensors alive until a garbage collection
    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.keys: dict[Any, str] = {}  # storage key → key of the tensor

    def walk(self, x: Any, path: str) -> Any:
        if x is None or isinstance(x, bool):
            return x
        if isinstance(x, int):
            return int(x)
        if isinstance(x, float):
            return float(x) if math.isfinite(x) else {"float": str(float(x))}
        if isinstance(x, str):
            return str(x)
        if isinstance(x, Tensor):
            return self.leaf(x, path)
        prefix = f"{path}/" if path else ""
        if type(x) in (list, tuple):
            items = [self.walk(value, f"{prefix}{i}") for i, value in enumerate(x)]
            return items if type(x) is list else {"tuple": items}
        if type(x) in _MAPPINGS.values():
            return {type(x).__name__: self.items(x, prefix)}
        raise TypeError(
            f"{self.name}: {path or 'the value'} is a {_type_name(x)}, which cannot be saved; use numbers, strings, "
            "tensors, None, and lists, tuples and dicts of these"
        )

    def items(self, x: Mapping[Any, Any], prefix: str) -> Any:
        if all(type(key) is str for key in x):
            return {key: self.walk(value, f"{prefix}{key}") for key, value in x.items()}
        return [[self.walk(k, f"{prefix}{k!r} (a key)"), self.walk(x[k], f"{prefix}{k}")] for k in x]

    def leaf(self, x: Tensor, path: str) -> dict[str, Any]:
        if type(x) not in _TENSOR_TYPES or x.layout != torch.strided or x.is_meta or x.is_quantized:
            raise TypeError(f"{self.name}: {path} is a {_type_name(x)}, which cannot be saved")
        x = x.detach()
        storage_key = _storage_key(x)
        key = self.keys.get(storage_key)
        if key is None:
            key = path
            while key in self.tensors:
                key += "'"  # {"a": {"b": …}} and {"a/b": …}
            self.tensors[self.keys.setdefault(storage_key, key)] = x
        node: dict[str, Any] = {"tensor": key}
        if isinstance(x, DTensor):
            return node | {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        if x.device.type != "cpu":
            node["device"] = x.device.type
        if not x.is_contiguous() and _has_no_gaps(x):
            node["stride"] = list(x.stride())  # such as channels last
        return node


def _storage_key(x: Tensor) -> Any:
    """Return a value that is equal for two tensors with the same elements in the same memory."""
    local = local_part(x)
    if local.numel() == 0:
        return id(x)  # empty tensors have no address
    return local.data_ptr(), local.device, local.dtype, tuple(local.shape), local.stride(), tuple(x.shape)


def _has_no_gaps(x: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps."""
    return torch.empty_like(x, device="meta").stride() == x.stride()


def _type_name(x: Any) -> str:
    if isinstance(x, Tensor) and type(x) in _TENSOR_TYPES:
        return "tensor on the meta device" if x.is_meta else f"{x.layout} or quantized tensor"
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as safetensors needs them: on the CPU, contiguous, without shared memory."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, x in tensors.items():
        x = x.detach().cpu().contiguous()
        storage = x.untyped_storage()
        if x.numel() and (storage.data_ptr() in seen or storage.nbytes() != x.numel() * x.itemsize):
            x = x.clone(memory_format=torch.contiguous_format)
        seen.add(x.untyped_storage().data_ptr())
        result[key] = x
    return result


@dataclass(frozen=True)
class ShardedTensorSpec:
    """Description of a saved tensor whose shards lie in the files of several workers."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def unpack(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Return the state that `pack` split. Tensors are copies; those not saved from the CPU move to `device`."""
    return _Unpacker(tensors, device).walk(tree)


class _Unpacker:
    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | None) -> None:
        self.tensors, self.device = tensors, device
        self.copies: dict[str, Tensor] = {}

    def walk(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self.walk(item) for item in x]
        if not isinstance(x, dict):
            return x
        if "tensor" in x:
            return self.leaf(x)
        ((kind, value),) = x.items()
        if kind == "float":
            return float(value)
        if kind == "tuple":
            return tuple(self.walk(item) for item in value)
        pairs = value.items() if isinstance(value, dict) else ((self.walk(key), item) for key, item in value)
        return _MAPPINGS[kind]({key: self.walk(item) for key, item in pairs})

    def leaf(self, node: dict[str, Any]) -> Tensor | ShardedTensorSpec:
        key = node["tensor"]
        if "shape" in node:
            dtype = getattr(torch, node["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{node['dtype']!r} is not a dtype")
            return ShardedTensorSpec(key, tuple(node["shape"]), dtype)
        if key not in self.copies:
            x = self.tensors[key].detach()
            device = x.device if self.device is None or "device" not in node else self.device
            stride = node.get("stride", x.contiguous().stride())
            self.copies[key] = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=device).copy_(x)
        return self.copies[key]
