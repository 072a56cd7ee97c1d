"""`compress_sharded`: an FSDP2 model's gradients averaged between its replicas, with fewer bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..distributed.workers import Workers
from ..optim.carry import Optimizers, as_list
from .aggregator import Aggregator
from .fsdp2_modules import check_replicas, group_of, layout_of, methods_for, sharded_modules
from .fsdp2_part import Part, Staged, refuse_hooked
from .meter import Meter
from .method import Method
from .methods.casts import BFloat16
from .settings import Methods
from .transport import Group

T = TypeVar("T")


def compress_sharded(
    model: nn.Module,
    method: Methods | None,
    replicas: dist.ProcessGroup | None,
    *,
    optimizer: Optimizers = None,
    scaler: Any = None,
    memory: bool | None = None,
    exchange: str | None = None,
    seed: int = 0,
    nonfinite: Literal["nan", "zero"] = "nan",
) -> ShardedHook:
    """Average between the replicas of a model that is sharded inside each. Call it on all ranks, once.

    Of a mesh (replicate, shard), `fully_shard` gets `mesh["shard"]` alone, and this the other dimension. FSDP reduces
    inside a replica. What it then has, one flat shard for each module it was applied to, is averaged between
    the replicas while the backward pass goes on. Such a shard has neither names nor shapes: methods for matrices are
    refused, and biases and norms are compressed with the rest. The replicas must start from the same weights.

    Args:
        model: sharded by `fully_shard` over a 1-D mesh, compiled or not.
        method: one method, or a mapping name pattern → method for the sharded modules, of which the outermost is
            called "(root)"; what matches none travels as it is. `BFloat16()` for None.
        replicas: the ranks that hold the same shard, `mesh["replicate"].get_group()`.
        optimizer, scaler: see `compress`. The learning rate counts where it is one for all of a sharded module.
        memory, exchange, seed: see `Aggregator`.
        nonfinite: "nan": a shard that is not finite on one replica becomes NaN on all of them, and nothing of this
            backward pass is kept for any module, which costs a copy of what is kept and, save for plain and 16-bit
            averages, a wait for the device. `GradScaler` and `clip_grad_norm_` find a NaN of one shard on all
            ranks. "zero": it becomes zero, and the step goes on with the others.

    >>> compress_sharded(nn.Linear(2, 2), BFloat16(), None)
    Traceback (most recent call last):
    TypeError: compress: a Linear is not sharded; apply fully_shard first, with a 1-D mesh
    """
    modules, mesh = sharded_modules(model)
    check_replicas(replicas, mesh)
    assert replicas is not None
    settings = {"exchange": exchange, "seed": seed, "nonfinite": nonfinite}
    hook = ShardedHook(replicas, mesh, as_list(optimizer), scaler, settings)
    hook._attach(modules, BFloat16() if method is None else method, memory)
    return hook


def attached(model: nn.Module) -> ShardedHook | None:
    """The hook that compresses this model, if there is one.

    >>> attached(nn.Linear(2, 2))
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and group_of(module) is not None:
            part = group_of(module)._all_reduce_hook
            return part.hook if isinstance(part, Part) else None
    return None


class ShardedHook:
    """A sharded model's compression, made by `compress_sharded`: change its method, read its meter, save its state."""

    method: Methods
    memory: bool | None

    def __init__(
        self,
        replicas: dist.ProcessGroup,
        mesh: DeviceMesh,
        optimizers: list[optim.Optimizer],
        scaler: Any,
        settings: dict[str, Any],
    ) -> None:
        device = torch.device(mesh.device_type)
        self.optimizers, self.scaler, self._settings = optimizers, scaler, settings
        self._transport = Group(replicas)
        self._peers = Workers(replicas, device, "compress")  # who hold the same shard
        self._shards = Workers(mesh.get_group(), device, "compress")  # who hold the others of this replica
        self._parts: dict[str, Part] = {}
        self._staged: list[Staged] = []  # of this backward pass, so far
        self._scale: float | None = None  # of its loss

    @property
    def meter(self) -> Meter:
        """What was sent between the replicas so far. It counts a step for every sharded module in every pass."""
        return self._transport.meter

    def use(self, method: Methods, memory: bool | None = None) -> None:
        """Another method from the next backward pass on. Call it on all ranks.

        Where the new one has a memory too, it goes on with the old one's; else that is sent with the next gradient.
        Whatever else the old one kept is dropped.
        """
        self._attach({name: part.module for name, part in self._parts.items()}, method, memory)

    def attach(self, model: nn.Module) -> None:
        """Go on with this model, after a rebuild or when parameters were frozen. Call it on all ranks.

        What is kept stays with modules that have the same trainable parameters as before, and is dropped elsewhere.
        """
        modules, mesh = sharded_modules(model)
        if dist.get_process_group_ranks(mesh.get_group()) != dist.get_process_group_ranks(self._shards.group):
            raise ValueError("compress: this model is sharded over other ranks than the one before")
        self._attach(modules, self.method, self.memory)

    def _attach(self, modules: Mapping[str, Any], method: Methods, memory: bool | None) -> None:
        """All that can fail comes first, on all ranks alike."""

        def sound() -> dict[str, Method]:
            for name, module in modules.items():
                refuse_hooked(name, group_of(module)._all_reduce_hook, self)
            return methods_for(modules, method, memory, self._settings["exchange"], self.optimizers)

        chosen = self._together(sound)
        layouts = {name: layout_of(group_of(module)) for name, module in modules.items()}
        known = {name: part for name, part in self._parts.items() if layouts.get(name) == part.layout}
        steps = {name: part.aggregator.steps for name, part in known.items()}
        facts = repr((method, memory, self._settings, layouts, steps))
        about = "the compression's method, settings or sharded modules; all must call it alike"
        here = f"{facts}, shard {self._shards.rank} of {self._shards.size}"
        self._shards.together(lambda: self._peers.agree(here, 0, about))
        self._shards.agree(facts, 0, about)
        parts = {}
        for name, module in modules.items():
            new = Aggregator(chosen[name], self._transport, memory=memory, smallest=0, **self._settings)
            part = known.get(name) or Part(self, name, layouts[name], module, chosen[name], new)
            parts[name] = replace(part, module=module, method=chosen[name])
        for name, part in parts.items():
            part.aggregator.use(chosen[name], memory)
            part.module.set_all_reduce_hook(part)
        self.method, self.memory, self._parts = method, memory, parts

    def _together(self, check: Callable[[], T]) -> T:
        """As `Workers.together`, over all shards of all replicas."""
        return self._shards.together(lambda: self._peers.together(check))

    def _loss_scale(self) -> float:
        """Read once in a backward pass: to ask a scaler is to wait for the device."""
        if self._scale is None:
            self._scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        return self._scale

    def _finish(self) -> None:
        """At the end of a backward pass, if any shard of it is bad on any rank: as if it had not been."""
        staged, self._staged, self._scale = self._staged, [], None
        if not staged or self._settings["nonfinite"] == "zero":
            return
        if staged[-1].stream is not None:
            torch.cuda.current_stream().wait_stream(staged[-1].stream)
        bad = torch.cat([x.bad for x in staged]).any().int()
        if self._shards.size > 1:  # the replicas of each shard know already
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._shards.group)
        if any(x.keeps for x in staged) and bool(bad):
            for x in reversed(staged):
                x.part.take_back(x.before)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by sharded module. Every rank has its own: save it on all of them."""
        groups = {
            name: {"layout": part.layout, "state": part.aggregator.state_dict()}
            for name, part in self._parts.items()
        }
        return {"shard": self._shards.rank, "shards": self._shards.size, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on all ranks. What was kept of other shards or parameters is dropped, with a warning.

        A state that knows none of this model's sharded modules is refused.
        """
        missing = {"shard", "shards", "groups"} - state.keys()
        if missing:
            raise ValueError(f"this is no sharded compressor's state: it lacks {', '.join(sorted(missing))}")
        if state["groups"] and not state["groups"].keys() & self._parts.keys():
            raise ValueError(
                f"this compressor's state is of another model, with {', '.join(list(state['groups'])[:3])} …; here are "
                f"{', '.join(list(self._parts)[:3])} …; load the state that was saved with this model"
            )
        same = (state["shard"], state["shards"]) == (self._shards.rank, self._shards.size)
        anew = []
        for name, part in self._parts.items():
            saved = state["groups"].get(name)
            if same and saved is not None and saved["layout"] == part.layout:
                part.aggregator.load_state_dict(saved["state"])
            else:
                anew.append(name)
                empty: dict[str, Any] = {"units": {}, "methods": {}, "shared": {}, "own": [{}]}
                steps = saved["state"]["steps"] if saved else 0
                part.aggregator.load_state_dict(part.aggregator.state_dict() | empty | {"steps": steps})
        if anew:
            warnings.warn(
                f"compression: {', '.join(anew[:5])}{' …' if len(anew) > 5 else ''} starts with empty memories: what "
                f"was saved is of shard {state['shard']} of {state['shards']}, or of other parameters",
                stacklevel=2,
            )
