"""The dense model that a sharded one was made of, and everything that keeps one from being rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ...distributed.workers import Workers
from ...layers.names import named_modules, own_name, unwrap


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their own names: shards, also where a forward pass has left them whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {own_name(name): p for name, p in unwrap(model).named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """All of them, a shared one under each of its names."""
    named = unwrap(model).named_buffers(remove_duplicate=False)
    return {own_name(name): buffer for name, buffer in named}


def local(x: Tensor) -> Tensor:
    """What this rank holds."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """Gathered, on every rank."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def part(full: Tensor, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """This rank's part of a whole tensor, placed as `like` is."""
    if isinstance(like, DTensor):
        full = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return torch.empty_like(like, dtype=dtype, device=device, requires_grad=False).copy_(full)


def outline(model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
    """The dense model as `build` makes it, on the meta device, once it is known to be what was sharded.

    Plans are made of it: in the sharded model a layer may be of another type (`FSDPLinear`).

    >>> build = lambda: nn.Sequential(nn.Linear(64, 64))
    >>> outline(build(), build)[0].weight.device
    device(type='meta')
    >>> outline(build(), lambda: nn.Sequential(nn.Linear(64, 32)))
    Traceback (most recent call last):
    ValueError: build() gives 0.weight as torch.float32 32×64, in the sharded model it is torch.float32 64×64
    """
    try:
        with torch.device("meta"):
            dense = build()
    except NotImplementedError as error:
        raise ValueError(
            f"build() cannot run on the meta device, where tensors have no values ({error}); what moves or "
            "loads them belongs outside"
        ) from error
    if not isinstance(dense, nn.Module):
        raise TypeError(f"build() gave a {type(dense).__name__}, not a model")
    here, there = parameters(model), parameters(dense)
    for name, p in there.items():
        if not p.is_meta:
            raise ValueError(
                f"build() gave {name} on {p.device}; it must make a new model on the default device, which is "
                "the meta device when it is called"
            )
    _same_names("parameter", here, there)
    _same_names("buffer", buffers(model), buffers(dense))
    for name, p in there.items():
        if _kind(p) != _kind(here[name]):
            raise ValueError(
                f"build() gives {name} as {_kind(p)}, in the sharded model it is {_kind(here[name])}"
            )
        p.requires_grad_(here[name].requires_grad)
    modes = {name: module.training for name, _, module in named_modules(model)}
    for name, _, module in named_modules(dense):
        module.training = modes.get(name, module.training)
    return dense


def check_sharded(shards: Mapping[str, Tensor]) -> None:
    """Refuse what cannot be gathered and shared out again."""
    if not any(isinstance(p, DTensor) for p in shards.values()):
        raise ValueError("rebuild is for models that fully_shard has sharded; call switch.step for others")
    for name, p in shards.items():
        if not isinstance(p, DTensor):
            continue
        mesh = p.device_mesh
        if not all(type(x) in (Shard, Replicate) for x in p.placements):
            raise ValueError(
                f"{name}: it is placed as {p.placements}; only Shard and Replicate are supported"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(f"{name}: this rank is not in its mesh; all must have a part")
        if not p.is_meta and p.device.type != mesh.device_type:
            raise ValueError(
                f"{name}: it is offloaded to the {p.device.type}; shards that are offloaded cannot be rebuilt"
            )


def check_alike(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Parameters that stay as they are must be sharded as they were."""
    for name, p in old.items():
        if name in new and _layout(p) != _layout(new[name]):
            raise ValueError(
                f"{name}: shard() makes it {_layout(new[name])}, in the model it is {_layout(p)}; shard alike"
            )


def check_finite(weights: Mapping[str, Tensor], workers: Workers) -> None:
    """Each rank looks at its parts, and all know what any of them has found."""
    bad = [not torch.isfinite(local(weight)).all() for weight in weights.values()]
    for name, found in zip(weights, workers.largest(torch.tensor(bad, dtype=torch.int32)), strict=True):
        if found:
            raise ValueError(f"{name}: the weight contains inf or NaN; nothing was changed")


def _same_names(what: str, here: Iterable[str], there: Iterable[str]) -> None:
    missing, extra = set(here) - set(there), set(there) - set(here)
    if missing or extra:
        raise ValueError(
            f"build() gives another model: {what} {min(missing | extra)} is "
            + ("not in it" if missing else "not in the sharded one")
        )


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {'×'.join(map(str, x.shape))}"


def _layout(x: Tensor) -> Any:
    return (x.device_mesh, x.placements) if isinstance(x, DTensor) else "not sharded"
