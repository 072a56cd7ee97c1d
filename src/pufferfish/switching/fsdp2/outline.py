"""The dense model that an FSDP2 model was built from, and checks that it can be rebuilt."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...distributed.ddp import reshard
from ...distributed.workers import Workers
from ...layers.names import named_modules, own_name, unwrap
from ...planning.svd import NOT_FINITE


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names without wrappers, as shards even if a forward pass has left them gathered."""
    reshard(model)
    return {own_name(name): p for name, p in unwrap(model).named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers by their names without wrappers; a shared buffer under each of its names."""
    named = unwrap(model).named_buffers(remove_duplicate=False)
    return {own_name(name): buffer for name, buffer in named}


def local(x: Tensor) -> Tensor:
    """The shard of this worker, without gradient."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def outline(model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
    """Build the dense model on the meta device, and check that it has the parameters of the sharded model.

    Plans are made for it, because `fully_shard` changes the types of modules (`FSDPLinear`).

    >>> build = lambda: nn.Sequential(nn.Linear(64, 64))
    >>> outline(build(), build)[0].weight.device
    device(type='meta')
    >>> outline(build(), lambda: nn.Sequential(nn.Linear(64, 32)))
    Traceback (most recent call last):
    ValueError: build() returns 0.weight as torch.float32 32×64, but in the sharded model it is torch.float32 64×64
    """
    try:
        with torch.device("meta"):
            dense = build()
    except NotImplementedError as error:
        raise ValueError(
            f"build() cannot run on the meta device, where tensors have no values ({error}); move or load tensors "
            "outside of build()"
        ) from error
    here, there = parameters(model), parameters(dense)
    for name, p in there.items():
        if not p.is_meta:
            raise ValueError(
                f"build() returned {name} on {p.device}; it must build a new model on the default device, which is "
                "the meta device when it is called"
            )
    _check_names("parameter", here, there)
    _check_names("buffer", buffers(model), buffers(dense))
    for name, p in there.items():
        if _kind(p) != _kind(here[name]):
            raise ValueError(
                f"build() returns {name} as {_kind(p)}, but in the sharded model it is {_kind(here[name])}"
            )
        p.requires_grad_(here[name].requires_grad)
    modes = {name: module.training for name, _, module in named_modules(model)}
    for name, _, module in named_modules(dense):
        module.training = modes.get(name, module.training)
    return dense


def check_sharded(shards: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all parameters can be gathered and sharded again."""
    if not any(isinstance(p, DTensor) for p in shards.values()):
        raise ValueError(
            "switch.rebuild needs a model sharded by fully_shard; call switch.step for other models"
        )
    for name, p in shards.items():
        if not isinstance(p, DTensor):
            continue
        mesh = p.device_mesh
        if not all(type(x) in (Shard, Replicate) for x in p.placements):
            raise ValueError(
                f"{name}: its placements are {p.placements}; only Shard and Replicate are supported"
            )
        if not p.is_meta and p.device.type != mesh.device_type:
            raise ValueError(
                f"{name}: its shards are offloaded to the {p.device.type} and cannot be rebuilt; train without offloading"
            )


def check_same_sharding(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a parameter that is not factorized would be sharded differently."""
    for name, p in old.items():
        if name in new and _layout(p) != _layout(new[name]):
            raise ValueError(
                f"{name}: shard() makes it {_layout(new[name])}, but in the model it is {_layout(p)}; shard both in the same way"
            )


def check_finite(weights: Mapping[str, Tensor], workers: Workers) -> None:
    """Raise ValueError on all workers if a shard of any of them is not finite."""
    bad = [not torch.isfinite(local(weight)).all() for weight in weights.values()]
    for name, is_bad in zip(weights, workers.max(torch.tensor(bad, dtype=torch.int32)), strict=True):
        if is_bad:
            raise ValueError(f"{name}: {NOT_FINITE}")


def _check_names(what: str, here: Iterable[str], there: Iterable[str]) -> None:
    missing, extra = set(here) - set(there), set(there) - set(here)
    if missing or extra:
        raise ValueError(
            f"build() returns a different model: {what} {min(missing | extra)} is "
            + ("not in it" if missing else "not in the sharded model")
        )


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {'×'.join(map(str, x.shape))}"


def _layout(x: Tensor) -> Any:
    return (x.device_mesh, x.placements) if isinstance(x, DTensor) else "not sharded"
