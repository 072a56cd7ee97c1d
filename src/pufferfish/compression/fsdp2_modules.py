"""A model that FSDP2 has sharded: its modules with parameters of their own, what their flat shards are, what suits them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from ..layers.names import own_name, unwrap
from . import settings as table
from .method import Method
from .settings import Methods

#: What the group of the outermost module is called.
ROOT = "(root)"


def sharded_modules(model: nn.Module) -> tuple[dict[str, Any], DeviceMesh]:
    """The modules with a parameter group of FSDP's, by name, and the mesh that all of them are sharded over."""
    found: dict[str, Any] = {}
    meshes: list[DeviceMesh] = []
    states = set()
    for path, module in unwrap(model).named_modules():
        if not isinstance(module, FSDPModule) or module._get_fsdp_state() in states:
            continue
        name, state = own_name(path) or ROOT, module._get_fsdp_state()
        states.add(state)  # several modules may share one
        if len(getattr(state, "_fsdp_param_groups", ())) > 1:
            raise ValueError(f"compress: {name} has parameters on several meshes; shard it over one")
        for p in group_of(module).fsdp_params if group_of(module) else ():
            mesh, placements = p.sharded_param.device_mesh, p.sharded_param.placements
            if mesh.ndim != 1 or not isinstance(placements[0], Shard):
                raise ValueError(
                    f"compress: {name} is placed as {placements}, so that FSDP itself averages between replicas; give "
                    'fully_shard the 1-D mesh["shard"] only, and this the group of mesh["replicate"]'
                )
            if meshes and mesh != meshes[0]:
                raise ValueError(f"compress: {name} is sharded over another mesh than {next(iter(found))}")
            meshes.append(mesh)
            found[name] = module
    if not found:
        raise TypeError(
            f"compress: a {type(model).__name__} is not sharded; apply fully_shard first, with a 1-D mesh"
        )
    return found, meshes[0]


def group_of(module: Any) -> Any:
    """FSDP's own record of a module: its parameters, its hook."""
    return module._get_fsdp_state()._fsdp_param_group


def layout_of(group: Any) -> str:
    """What a flat shard consists of, in short."""
    parts = [
        (p._module_info.param_name, tuple(p.sharded_param.shape))
        for p in group.fsdp_params
        if p.sharded_param.requires_grad
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def optimizer_groups(
    optimizers: Sequence[optim.Optimizer], module: Any
) -> list[tuple[optim.Optimizer, dict[str, Any]]]:
    """Those that hold parameters of a sharded module."""
    mine = {id(p.sharded_param) for p in group_of(module).fsdp_params}
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    return [(optimizer, group) for optimizer, group in groups if any(id(p) in mine for p in group["params"])]


def methods_for(
    modules: Mapping[str, Any],
    methods: Methods,
    memory: bool | None,
    exchange: str | None,
    optimizers: Sequence[optim.Optimizer],
) -> dict[str, Method]:
    """The method of every sharded module, if it can work there."""
    table.check(methods, memory, "layer", exchange)
    for pattern, method in table.by_pattern(methods).items():
        if method.matrix:
            raise ValueError(
                f"compress: {type(method).__name__} works on matrices, and FSDP hands over flat shards without "
                "shapes; take one that works on elements, such as TopK, BlockInt8 or BFloat16"
            )
        if not any(table.matches(name, pattern) for name in modules):
            raise ValueError(
                f"compress: the pattern {pattern!r} matches no module that fully_shard was applied to; there are "
                f"{', '.join(list(modules)[:5])} …"
            )
    chosen = table.choose(methods, modules)
    for name, method in chosen.items():
        for optimizer, group in optimizer_groups(optimizers, modules[name]):
            if method.has_momentum and (group.get("momentum") or "betas" in group):
                raise ValueError(
                    f"{name}: {type(method).__name__} has a momentum of its own, and so has the "
                    f"{type(optimizer).__name__} for its parameters; give them an optimizer without"
                )
    return chosen


def check_replicas(replicas: dist.ProcessGroup | None, mesh: DeviceMesh) -> None:
    wanted = 'give replicas=mesh["replicate"].get_group(), the ranks that hold the same shard'
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"compress: replicas={replicas!r} is no process group; {wanted}")
    if dist.get_rank(replicas) < 0:
        raise ValueError(f"compress: this rank is not one of the replicas; {wanted}")
    here = set(dist.get_process_group_ranks(mesh.get_group()))
    others = here & set(dist.get_process_group_ranks(replicas)) - {dist.get_rank()}
    if others:
        raise ValueError(f"compress: rank {min(others)} holds another shard of this replica; {wanted}")
