"""Nested state as JSON and tensors, and back, exactly: a state dict in files without pickle."""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_TENSOR_TYPES = (Tensor, nn.Parameter, DTensor)


@dataclass(frozen=True)
class ShardedTensorSpec:
    """Description of a saved tensor whose shards lie in the files of several workers."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


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


def unpack(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Return the state that `pack` split. Tensors are copies; those not saved from the CPU move to `device`."""
    return _Unpacker(tensors, device).walk(tree)


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


def _storage_key(x: Tensor) -> Any:
    """Return a value that is equal for two tensors with the same elements in the same memory."""
    local = x.to_local() if isinstance(x, DTensor) else x
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
