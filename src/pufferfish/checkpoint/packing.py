"""Nested state as JSON and tensors, and back, exactly: what a state dict holds, in files without pickle."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_PLAIN = (Tensor, nn.Parameter, DTensor)


@dataclass(frozen=True)
class Shards:
    """A tensor that lies in pieces on several ranks: what the tree says of it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[int | None, ...]  # for every dimension of the mesh: which of the tensor's it cuts


def pack(state: Any, at: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """`state` as a tree for JSON, and the tensors that the tree refers to by key.

    State is made of dicts, lists, tuples, None, truth values, numbers, text and tensors. A tensor that
    occurs twice is kept once, one in shards comes back as `Shards`. Anything else is a TypeError that says
    where it is.

    >>> tree, tensors = pack({"lr": 0.1, "betas": (0.9, 0.99), "m": torch.zeros(2)})
    >>> tree
    {'dict': {'lr': 0.1, 'betas': {'tuple': [0.9, 0.99]}, 'm': {'tensor': 'm'}}}
    >>> unpack(tree, tensors)
    {'lr': 0.1, 'betas': (0.9, 0.99), 'm': tensor([0., 0.])}
    """
    packer = _Packer(at)
    return packer.walk(state, ""), packer.tensors


def unpack(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """The state that `pack` was given. Tensors are copies; those that were not on the CPU go to `device`."""
    return _Unpacker(tensors, device).walk(tree)


class _Packer:  # a class, not nested functions: those would keep the tensors alive until a garbage collection
    def __init__(self, at: str) -> None:
        self.at = at
        self.tensors: dict[str, Tensor] = {}
        self.keys: dict[Any, str] = {}  # where a tensor lies in memory → its key

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
        within = f"{path}/" if path else ""
        if type(x) in (list, tuple):
            items = [self.walk(value, f"{within}{i}") for i, value in enumerate(x)]
            return items if type(x) is list else {"tuple": items}
        if type(x) in _MAPPINGS.values():
            kind = type(x).__name__
            if all(type(key) is str for key in x):
                return {kind: {key: self.walk(value, f"{within}{key}") for key, value in x.items()}}
            return {
                kind: [[self.walk(k, f"{within}{k!r} (a key)"), self.walk(x[k], f"{within}{k}")] for k in x]
            }
        raise TypeError(
            f"{self.at}: {path or 'it'} is a {_kind(x)}; only numbers, text, tensors, None, lists, tuples and "
            "dicts of them can be saved"
        )

    def leaf(self, x: Tensor, path: str) -> dict[str, Any]:
        if type(x) not in _PLAIN or x.layout != torch.strided or x.is_meta or x.is_quantized:
            raise TypeError(f"{self.at}: {path} is a {_kind(x)}, which cannot be saved")
        x = x.detach()
        place = _place(x)
        key = self.keys.get(place)
        if key is None:
            key = path
            while key in self.tensors:
                key += "'"  # {"a": {"b": …}} and {"a/b": …}
            self.tensors[self.keys.setdefault(place, key)] = x
        node: dict[str, Any] = {"tensor": key}
        if isinstance(x, DTensor):
            dims = [getattr(placement, "dim", None) for placement in x.placements]
            return node | {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."), "dims": dims}
        if x.device.type != "cpu":
            node["device"] = x.device.type
        if not x.is_contiguous() and _dense(x):
            node["stride"] = list(x.stride())  # channels last: the order in memory is kept too
        return node


class _Unpacker:
    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | None) -> None:
        self.tensors, self.device = tensors, device
        self.made: dict[str, Tensor] = {}

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

    def leaf(self, node: dict[str, Any]) -> Tensor | Shards:
        key = node["tensor"]
        if "shape" in node:
            return Shards(key, tuple(node["shape"]), getattr(torch, node["dtype"]), tuple(node["dims"]))
        if key not in self.made:
            x = self.tensors[key].detach()
            where = x.device if self.device is None or "device" not in node else self.device
            stride = node.get("stride", x.contiguous().stride())
            self.made[key] = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=where).copy_(x)
        return self.made[key]


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values as safetensors wants them: on the CPU, contiguous, each in memory of its own."""
    made: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, x in tensors.items():
        x = x.detach().cpu().contiguous()
        storage = x.untyped_storage()
        if x.numel() and (storage.data_ptr() in seen or storage.nbytes() != x.numel() * x.itemsize):
            x = x.clone(memory_format=torch.contiguous_format)
        seen.add(x.untyped_storage().data_ptr())
        made[key] = x
    return made


def _place(x: Tensor) -> Any:
    """Equal for two tensors that are the same numbers in the same memory."""
    local = x.to_local() if isinstance(x, DTensor) else x
    if local.numel() == 0:
        return id(x)  # empty ones have no place; nothing to keep twice
    return local.data_ptr(), local.device, local.dtype, tuple(local.shape), local.stride(), tuple(x.shape)


def _dense(x: Tensor) -> bool:
    """Without gaps or overlaps in memory."""
    return torch.empty_like(x, device="meta").stride() == x.stride()


def _kind(x: Any) -> str:
    if isinstance(x, Tensor) and type(x) in _PLAIN:
        return "tensor on the meta device" if x.is_meta else f"{x.layout} or quantized tensor"
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
