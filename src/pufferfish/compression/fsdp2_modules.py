"""Modules that FSDP2 was applied to: their names, flat shards, optimizers and methods."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from ..layers.names import own_name, unwrap
from .settings import Settings, matches

#: Name of the outermost module.
ROOT = "(root)"


def sharded_modules(model: nn.Module) -> tuple[dict[str, Any], DeviceMesh]:
    """Return the modules that have an FSDP parameter group, by name, and the mesh they are sharded over."""
    found: dict[str, Any] = {}
    meshes: list[DeviceMesh] = []
    states = set()
    for path, p in unwrap(model).named_parameters():
        if p.is_complex() and p.requires_grad:
            raise ValueError(
                f"compress: {own_name(path)} is complex, which is supported under DDP only; keep it as real pairs "
                "(torch.view_as_real)"
            )
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
                    f"compress: {name} is placed as {placements}, so FSDP itself averages between replicas; pass "
                    'only the 1-D mesh["shard"] to fully_shard, and the group of mesh["replicate"] to compress'
                )
            if meshes and mesh != meshes[0]:
                raise ValueError(
                    f"compress: {name} and {next(iter(found))} are sharded over different meshes; use one mesh"
                )
            meshes.append(mesh)
            found[name] = module
    if not found:
        raise TypeError(
            f"compress: a {type(model).__name__} is not sharded; apply fully_shard first, with a 1-D mesh"
        )
    return found, meshes[0]


def module_paths(model: nn.Module) -> dict[int, str]:
    """Return the names of all modules, by id."""
    return {id(module): own_name(path) for path, module in unwrap(model).named_modules()}


def group_of(module: Any) -> Any:
    """FSDP's parameter group of a module, which holds its parameters and hook; None if there is not one."""
    state = module._get_fsdp_state()
    # With several, which `sharded_modules` refuses, reading the attribute raises AssertionError.
    return None if len(getattr(state, "_fsdp_param_groups", ())) > 1 else state._fsdp_param_group


def layout_of(group: Any) -> str:
    """Digest of the names and shapes in a flat shard."""
    parts = [
        (p._module_info.param_name, tuple(p.sharded_param.shape))
        for p in group.fsdp_params
        if p.sharded_param.requires_grad
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def optimizer_groups(
    optimizers: Sequence[optim.Optimizer], module: Any
) -> list[tuple[optim.Optimizer, dict[str, Any]]]:
    """Optimizers and parameter groups that hold parameters of a sharded module."""
    mine = {id(p.sharded_param) for p in group_of(module).fsdp_params}
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    return [(optimizer, group) for optimizer, group in groups if any(id(p) in mine for p in group["params"])]


def choose_settings(
    modules: Mapping[str, Any], settings: Settings, optimizers: Sequence[optim.Optimizer]
) -> dict[str, Settings]:
    """Return the settings, with one method, of every sharded module; raise ValueError if it cannot work there."""
    for pattern in settings.by_pattern:
        if not any(matches(name, pattern) for name in modules):
            raise ValueError(
                f"compress: the pattern {pattern!r} matches no module that fully_shard was applied to; these are "
                f"{', '.join(list(modules)[:5])} …"
            )
    chosen = settings.choose(modules)
    for name, method in chosen.items():
        for optimizer, group in optimizer_groups(optimizers, modules[name]):
            if method.has_momentum and (group.get("momentum") or "betas" in group):
                raise ValueError(
                    f"{name}: {type(method).__name__} has its own momentum, and so does the {type(optimizer).__name__} of "
                    "its parameters; use an optimizer without momentum"
                )
    # A flat shard has no small tensors.
    return {
        name: replace(settings, method=method, smallest=settings.smallest if method.matrix else 0)
        for name, method in chosen.items()
    }


def check_replicas(replicas: dist.ProcessGroup | None, mesh: DeviceMesh) -> None:
    wanted = 'pass replicas=mesh["replicate"].get_group(), the ranks that hold the same shard'
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"compress: replicas={replicas!r} is not a process group; {wanted}")
    here = set(dist.get_process_group_ranks(mesh.get_group()))
    others = here & set(dist.get_process_group_ranks(replicas)) - {dist.get_rank()}
    if others:
        raise ValueError(f"compress: rank {min(others)} holds another shard of this replica; {wanted}")


def check_saved(state: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Raise ValueError if `state` is none of this hook's, or has none of the sharded modules of this model."""
    missing = {"shard", "shards", "modules"} - state.keys()
    if missing:
        raise ValueError(f"not a state of sharded compression: it lacks {', '.join(sorted(missing))}")
    saved, here = list(state["modules"]), list(modules)
    if saved and not set(saved) & set(here):
        raise ValueError(
            f"this compression state belongs to another model, with {', '.join(saved[:3])} …; this model has "
            f"{', '.join(here[:3])} …; load the state that was saved with it"
        )
