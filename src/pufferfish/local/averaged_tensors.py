"""Tensors of a model that local steps average, and checks of them."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..layers.names import own_name, unwrap


def check_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise if the model cannot be trained in local steps between the workers of `group`."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and _overlap(module.process_group, group):
            raise TypeError(
                "LocalSteps: DistributedDataParallel already averages every gradient; pass ddp.module, or, for DDP "
                "inside each replica, the workers with the same position in all replicas as group"
            )
        if "_fsdp_wrapped_module" in module._modules:
            raise TypeError(
                "LocalSteps: the model is sharded by FSDP1; shard it by fully_shard, or pass the unwrapped module"
            )
    params = trainable_parameters(model)
    if not params:
        raise ValueError("LocalSteps: no parameter of the model requires a gradient")
    device = next(iter(params.values())).device
    sharded = any(isinstance(p, DTensor) for p in params.values())
    for name, p in params.items():
        if isinstance(p, DTensor):
            groups = [p.device_mesh.get_group(i) for i in range(p.device_mesh.ndim)]
            if any(_overlap(inside, group) for inside in groups) or any(x.is_partial() for x in p.placements):
                raise TypeError(
                    f"LocalSteps: {name} is a DTensor {p.placements} over workers that would average it; pass the "
                    "workers that hold the same shard in all replicas as group"
                )
        elif sharded:
            raise TypeError(
                f"LocalSteps: {name} is not sharded, but other parameters are; apply fully_shard to the whole model"
            )
        if not p.is_floating_point() or p.device != device:
            raise TypeError(
                f"LocalSteps: {name} is {p.dtype} on {p.device}; all parameters must be floating-point on {device}"
            )


def inside_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups of workers that train this replica together, by DDP or FSDP2."""
    groups = [m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)]
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)][:1]
    groups += [mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim)]
    return [group for group in groups if dist.get_world_size(group) > 1]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass without a backward pass leaves whole parameters
    return {own_name(name): p for name, p in unwrap(model).named_parameters() if p.requires_grad}


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that can be averaged: no counters, no caches, no masks with infinities."""
    inner = unwrap(model)
    saved = inner.state_dict().keys()
    floats = {name: b for name, b in inner.named_buffers() if b.is_floating_point() and name in saved}
    return {own_name(name): b for name, b in floats.items() if bool(b.isfinite().all())}


def local_part(x: Tensor) -> Tensor:
    """Return the part of a tensor that this worker holds: its shard, or all of it."""
    return x.to_local() if isinstance(x, DTensor) else x


def check_shapes(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], when: str, remedy: str) -> None:
    """Raise if tensors differ from those `before` in name or shape; `when` and `remedy` complete the message."""
    for name in [*tensors, *before]:
        a, b = tensors.get(name), before.get(name)
        if a is None or b is None or a.shape != b.shape:
            raise ValueError(
                f"LocalSteps: {name} is {_shape(a)}, but was {_shape(b)} when the model {when}; {remedy}"
            )


def _overlap(inside: dist.ProcessGroup, group: dist.ProcessGroup | None) -> bool:
    """Whether two groups have more workers in common than this one."""
    if group is None:
        return False
    ranks = dist.get_process_group_ranks
    return len({*ranks(inside)} & {*ranks(group)}) > 1


def _shape(x: Tensor | None) -> str:
    return "missing" if x is None else "×".join(map(str, x.shape)) or "a scalar"
