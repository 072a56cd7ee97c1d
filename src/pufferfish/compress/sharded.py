"""`compress_sharded`: an FSDP2 model's gradients averaged between its replicas, with fewer bytes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from ..names import own_name, unwrap
from ..optim import Optimizers, as_list
from ..ranks import Workers
from . import table
from .aggregator import Aggregator
from .casts import BFloat16
from .meter import Meter
from .method import Method
from .table import Methods
from .transport import Group

T = TypeVar("T")
#: What the group of the outermost module is called.
ROOT = "(root)"


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
    modules, mesh = _sharded(model)
    _check_replicas(replicas, mesh)
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
        if isinstance(module, FSDPModule) and _group(module) is not None:
            part = _group(module)._all_reduce_hook
            return part.hook if isinstance(part, _Part) else None
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
        self._parts: dict[str, _Part] = {}
        self._staged: list[_Staged] = []  # of this backward pass, so far
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
        modules, mesh = _sharded(model)
        if dist.get_process_group_ranks(mesh.get_group()) != dist.get_process_group_ranks(self._shards.group):
            raise ValueError("compress: this model is sharded over other ranks than the one before")
        self._attach(modules, self.method, self.memory)

    def _attach(self, modules: Mapping[str, Any], method: Methods, memory: bool | None) -> None:
        """All that can fail comes first, on all ranks alike."""

        def sound() -> dict[str, Method]:
            for name, module in modules.items():
                _refuse_hooked(name, _group(module)._all_reduce_hook, self)
            return self._chosen(modules, method, memory)

        chosen = self._together(sound)
        layouts = {name: _layout(_group(module)) for name, module in modules.items()}
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
            part = known.get(name) or _Part(self, name, layouts[name], module, chosen[name], new)
            parts[name] = replace(part, module=module, method=chosen[name])
        for name, part in parts.items():
            part.aggregator.use(chosen[name], memory)
            part.module.set_all_reduce_hook(part)
        self.method, self.memory, self._parts = method, memory, parts

    def _together(self, check: Callable[[], T]) -> T:
        """As `Workers.together`, over all shards of all replicas."""
        return self._shards.together(lambda: self._peers.together(check))

    def _chosen(self, modules: Mapping[str, Any], methods: Methods, memory: bool | None) -> dict[str, Method]:
        """The method of every sharded module, if it can work there."""
        table.check(methods, memory, "layer", self._settings["exchange"])
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
            for optimizer, group in self._optimizer_groups(modules[name]):
                if method.has_momentum and (group.get("momentum") or "betas" in group):
                    raise ValueError(
                        f"{name}: {type(method).__name__} has a momentum of its own, and so has the "
                        f"{type(optimizer).__name__} for its parameters; give them an optimizer without"
                    )
        return chosen

    def _optimizer_groups(self, module: Any) -> list[tuple[optim.Optimizer, dict[str, Any]]]:
        """Those that hold parameters of a sharded module."""
        mine = {id(p.sharded_param) for p in _group(module).fsdp_params}
        groups = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        return [
            (optimizer, group) for optimizer, group in groups if any(id(p) in mine for p in group["params"])
        ]

    def _units(self, part: _Part) -> dict[str, float]:
        """Loss scale over learning rate; 0 where that is not one number."""
        rates = {
            float(group["lr"])
            for optimizer, group in self._optimizer_groups(part.module)
            if isinstance(optimizer, optim.SGD)
        }
        if not rates and self.scaler is None:
            return {}
        if self._scale is None:
            self._scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        rate = 1.0 if not rates else rates.pop() if len(rates) == 1 else 0.0
        return {part.key: self._scale / rate if rate else 0.0}

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
        """Go on from there, on all ranks. What was kept of other shards or parameters is dropped, with a warning."""
        missing = {"shard", "shards", "groups"} - state.keys()
        if missing:
            raise ValueError(f"this is no sharded compressor's state: it lacks {', '.join(sorted(missing))}")
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


@dataclass(eq=False)
class _Part:
    """The all-reduce hook of one module that FSDP was applied to: the flat shard of its gradients, averaged in place."""

    hook: ShardedHook
    name: str
    layout: str
    module: Any
    method: Method
    aggregator: Aggregator
    numel: int | None = None  # of the shard, the last time
    waiting: Tensor | None = None  # the sum of passes that were not to be averaged yet

    @property
    def key(self) -> str:
        """Its name among random streams, of which every shard has its own."""
        return f"{self.name}[{self.hook._shards.rank}/{self.hook._shards.size}]"

    @torch.no_grad()
    def __call__(self, flat: Tensor) -> None:
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        if stream is not None:  # FSDP may let go of it before this stream is done
            flat.record_stream(stream)
        # set_requires_all_reduce(False): on a 1-D mesh FSDP itself does not heed it
        if not _group(self.module).all_reduce_grads:
            self.waiting = flat.clone() if self.waiting is None else self.waiting + flat
            flat.zero_()
            return
        if self.waiting is not None:
            flat += self.waiting
            self.waiting = None
        before = self.aggregator.state_dict()
        keeps = bool(before["shared"] or any(before["own"]))
        if keeps and self.numel not in (None, flat.numel()):
            raise ValueError(
                f"{self.name}: a shard of {flat.numel():,} gradients, where there were {self.numel:,}: other parameters "
                "were used than before, and what is kept does not fit. Call set_reduce_scatter_unused_params(True) on "
                "the model, or take a method that keeps nothing, such as BFloat16; after freezing parameters, call "
                "attach(model) of the hook"
            )
        self.numel = flat.numel()
        units = self.hook._units(self) if self.aggregator.remembers else {}
        flat.copy_(self.aggregator({self.key: flat}, units, self.hook._scale or 1.0)[self.key])
        keeps |= not self.method.elementwise
        self.hook._staged.append(_Staged(self, before, keeps, flat[:1].isnan(), stream))
        Variable._execution_engine.queue_callback(self.hook._finish)  # the first of them settles all

    def take_back(self, before: dict[str, Any]) -> None:
        """Keep what was kept before; random streams go on."""
        steps = self.aggregator.steps
        self.aggregator.load_state_dict(before)
        self.aggregator.steps = steps


@dataclass(frozen=True)
class _Staged:
    """A module's exchange in this backward pass."""

    part: _Part
    before: dict[str, Any]  # the state before it
    keeps: bool  # whether there was any, or may be now
    bad: Tensor
    stream: torch.cuda.Stream | None


def _sharded(model: nn.Module) -> tuple[dict[str, Any], DeviceMesh]:
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
        for p in _group(module).fsdp_params if _group(module) else ():
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


def _group(module: Any) -> Any:
    """FSDP's own record of a module: its parameters, its hook."""
    return module._get_fsdp_state()._fsdp_param_group


def _layout(group: Any) -> str:
    """What a flat shard consists of, in short."""
    parts = [
        (p._module_info.param_name, tuple(p.sharded_param.shape))
        for p in group.fsdp_params
        if p.sharded_param.requires_grad
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _check_replicas(replicas: dist.ProcessGroup | None, mesh: DeviceMesh) -> None:
    wanted = 'give replicas=mesh["replicate"].get_group(), the ranks that hold the same shard'
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"compress: replicas={replicas!r} is no process group; {wanted}")
    if dist.get_rank(replicas) < 0:
        raise ValueError(f"compress: this rank is not one of the replicas; {wanted}")
    here = set(dist.get_process_group_ranks(mesh.get_group()))
    others = here & set(dist.get_process_group_ranks(replicas)) - {dist.get_rank()}
    if others:
        raise ValueError(f"compress: rank {min(others)} holds another shard of this replica; {wanted}")


def _refuse_hooked(name: str, present: Any, hook: ShardedHook) -> None:
    if isinstance(present, _Part) and present.hook is not hook:
        raise ValueError(
            "compress: this model is compressed already; change its method by use() of that hook"
        )
    if present is not None and not isinstance(present, _Part):
        raise ValueError(f"compress: {name} has an all-reduce hook already, and takes only one")
