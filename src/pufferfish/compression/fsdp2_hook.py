"""`FSDP2Hook`: gradients of a model sharded by FSDP2, averaged between its replicas with fewer bytes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..distributed.workers import Workers
from ..layers import matches, own_name, unwrap
from ..lowrank.optimizers import Optimizers, as_list
from .engine import Engine, Step, make_batches
from .exchange import Group, Meter
from .method import Method
from .settings import Methods, Settings
from .state import updates_by_rate

T = TypeVar("T")
#: Name of the outermost module.
ROOT = "(root)"


def compress_fsdp2(
    model: nn.Module,
    settings: Callable[[], Settings],
    replicas: dist.ProcessGroup | None,
    *,
    optimizer: Optimizers = None,
) -> FSDP2Hook:
    """Average gradients between the replicas of a model that is sharded inside each. Call it on all workers, once.

    With a mesh (replicate, shard), pass `mesh["shard"]` alone to `fully_shard`, and the other dimension here. FSDP reduces
    inside a replica. Its result, one flat shard for each module it was applied to, is averaged between the replicas
    during the backward pass. Methods for matrices, such as PowerSGD, compress each worker's own rows of each matrix, so
    that every shard has factors of its own; vectors are sent uncompressed, and all parameters of a module must be used
    in every backward pass. To other methods a shard is one vector: biases and norms are compressed with the rest. The
    replicas must start from the same weights.

    Args:
        model: Sharded by `fully_shard` over a 1-D mesh, compiled or not.
        settings: Makes the settings; an error on one worker is raised on all. Name patterns match sharded modules, the
            outermost of which is called "(root)". `smallest` is for methods for matrices: the number of elements of this
            worker's rows. With nonfinite="nan" a shard that is not finite on one replica becomes NaN
            on all of them, and nothing of this backward pass is kept for any module; `GradScaler` and
            `clip_grad_norm_` find a NaN of one shard on all workers. With "zero" it becomes zero, and the step
            continues with the others.
        replicas: The workers that hold the same shard, `mesh["replicate"].get_group()`.
        optimizer: See `compress`. The learning rate counts if it is the same for a whole sharded module.

    >>> from pufferfish.compression import BFloat16
    >>> compress_fsdp2(nn.Linear(2, 2), lambda: Settings(BFloat16()), None)
    Traceback (most recent call last):
    TypeError: compress: a Linear is not sharded; apply fully_shard first, with a 1-D mesh
    """
    modules, mesh = sharded_modules(model)
    check_replicas(replicas, mesh)
    assert replicas is not None
    hook = FSDP2Hook(replicas, mesh, as_list(optimizer))

    def checked() -> Settings:
        chosen = settings()
        matrices = any(method.layout == "matrices" for method in chosen.by_pattern.values())
        smallest = chosen.smallest if matrices else 1024
        if chosen != replace(chosen, scope="layer", hierarchy="flat", smallest=smallest, overlap=None):
            raise ValueError(
                "compress: under FSDP2 leave scope, hierarchy and overlap at their defaults, and smallest too unless the "
                "method is for matrices: shards have no layers, are sent one by one and are already averaged inside a replica"
            )
        return chosen

    hook._attach(modules, module_paths(model), hook._run_on_all(checked))
    return hook


def sharded_modules(model: nn.Module, *, native_replicas: bool = False) -> tuple[dict[str, Any], DeviceMesh]:
    """Return the modules that have an FSDP parameter group, by name, and the mesh they are sharded over.

    `native_replicas`: whether FSDP itself may average between replicas.
    """
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
            mesh = _checked_mesh(name, p.sharded_param, native_replicas)
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


def _checked_mesh(name: str, p: Any, native_replicas: bool) -> DeviceMesh:
    """The mesh that a parameter is sharded over; raise ValueError if it is on a kind that cannot be compressed."""
    mesh: DeviceMesh = p.device_mesh
    kinds = sorted(type(placement).__name__ for placement in p.placements)
    if native_replicas and kinds not in (["Shard"], ["Replicate", "Shard"]):
        raise ValueError(
            f"compress: {name} is placed as {p.placements}; shard it over one dimension of a mesh"
        )
    if not native_replicas and kinds != ["Shard"]:
        raise ValueError(
            f"compress: {name} is placed as {p.placements}, so FSDP itself averages between replicas; pass "
            'only the 1-D mesh["shard"] to fully_shard, and the group of mesh["replicate"] to compress'
        )
    return mesh


def check_replicas(replicas: dist.ProcessGroup | None, mesh: DeviceMesh) -> None:
    wanted = 'pass replicas=mesh["replicate"].get_group(), the ranks that hold the same shard'
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"compress: replicas={replicas!r} is not a process group; {wanted}")
    here = set(dist.get_process_group_ranks(mesh.get_group()))
    others = here & set(dist.get_process_group_ranks(replicas)) - {dist.get_rank()}
    if others:
        raise ValueError(f"compress: rank {min(others)} holds another shard of this replica; {wanted}")


def find_fsdp2_hook(model: nn.Module) -> FSDP2Hook | None:
    """The hook that compresses this model, if there is one.

    >>> find_fsdp2_hook(nn.Linear(2, 2))
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and group_of(module) is not None:
            part = group_of(module)._all_reduce_hook
            return part.hook if isinstance(part, _ModuleHook) else None
    return None


class FSDP2Hook:
    """Compression of a sharded model, made by `compress`: change its method, read its meter, save its state."""

    settings: Settings

    def __init__(
        self, replicas: dist.ProcessGroup, mesh: DeviceMesh, optimizers: list[optim.Optimizer]
    ) -> None:
        device = torch.device(mesh.device_type)
        self.optimizers = optimizers
        self._transport = Group(replicas)
        self._peers = Workers(replicas, device, "compress")  # those that hold the same shard
        self._shards = Workers(
            mesh.get_group(), device, "compress"
        )  # those that hold the others of this replica
        self._parts: dict[str, _ModuleHook] = {}
        self._paths: Mapping[int, str] = {}  # names of the model's modules, by id
        self._averaged: list[_ModuleHook] = []  # in this backward pass, not committed yet
        self._scale: float | None = None  # loss scale of this backward pass

    @property
    def method(self) -> Methods:
        """The current method or methods."""
        method = self.settings.method
        assert method is not None
        return method

    @property
    def meter(self) -> Meter:
        """Bytes and times between the replicas so far; a step is a backward pass."""
        return self._transport.meter

    def use(self, method: Methods, error_feedback: bool | None = None) -> None:
        """Change the method from the next backward pass on. Call it on all workers.

        Error feedback is kept if the new method has it too; otherwise it is sent with the next gradient. Other
        state of the old method is dropped.
        """
        self._peers.operation = self._shards.operation = "hook.use"
        settings = self._run_on_all(
            lambda: replace(self.settings, method=method, error_feedback=error_feedback)
        )
        self._attach({name: part.module for name, part in self._parts.items()}, self._paths, settings)

    def attach(self, model: nn.Module) -> None:
        """Continue with this model, after a rebuild or after parameters were frozen. Call it on all workers.

        State is kept for modules that have the same trainable parameters as before, and dropped for others.
        """
        self._peers.operation = self._shards.operation = "hook.attach"
        modules, mesh = sharded_modules(model)
        if dist.get_process_group_ranks(mesh.get_group()) != dist.get_process_group_ranks(self._shards.group):
            raise ValueError("compress: this model is sharded over other workers than the one before")
        self._attach(modules, module_paths(model), self.settings)

    def _attach(self, modules: Mapping[str, Any], paths: Mapping[int, str], settings: Settings) -> None:
        """Give every module its hook. Everything that can fail comes first, on all workers alike."""

        def checked() -> dict[str, Settings]:
            for name, module in modules.items():
                _refuse_other_hook(name, group_of(module)._all_reduce_hook, self)
            return choose_settings(modules, settings, self.optimizers)

        chosen = self._run_on_all(checked)
        layouts = {name: layout_of(group_of(module)) for name, module in modules.items()}
        known = {name: part for name, part in self._parts.items() if layouts.get(name) == part.layout}
        steps = {name: part.engine.steps for name, part in known.items()}
        facts = repr((settings, layouts, steps))
        about = "the compression's method, settings or sharded modules; make the same call on all workers"
        here = f"{facts}, shard {self._shards.rank} of {self._shards.size}"
        self._shards.run_on_all(lambda: self._peers.agree(here, 0, about))
        self._shards.agree(facts, 0, about)
        parts: dict[str, _ModuleHook] = {}
        used: set[Method] = set()
        for name, module in modules.items():
            rows = Rows(name, module, chosen[name], paths, (self._shards.rank, self._shards.size))
            engine = known[name].engine if name in known else Engine(chosen[name], self._transport)
            if name in known and known[name].rows.matrix != rows.matrix:
                engine = move_engine(engine, known[name].rows, rows)
            engine.use(chosen[name])
            used |= rows.compressed
            parts[name] = _ModuleHook(self, name, layouts[name], module, engine, rows)
            if name in known:
                parts[name].numel = known[name].numel
            module.set_all_reduce_hook(parts[name])
        self.settings, self._parts, self._paths = settings, parts, paths
        settings.warn_unused(used, stacklevel=5)

    def _run_on_all(self, check: Callable[[], T]) -> T:
        """`Workers.run_on_all` over all shards of all replicas."""
        return self._shards.run_on_all(lambda: self._peers.run_on_all(check))

    def _loss_scale(self) -> float:
        """Loss scale, read once in a backward pass: reading a scaler waits for the device."""
        if self._scale is None:
            scaler = self.settings.scaler
            self._scale = 1.0 if scaler is None else float(scaler.get_scale())
        return self._scale

    def _commit(self) -> None:
        """At the end of a backward pass, keep its state, unless a shard was not finite on any worker."""
        averaged, self._averaged, self._scale = self._averaged, [], None
        if not averaged:
            return
        ok = None
        stream = averaged[-1].stream
        with torch.no_grad(), torch.cuda.stream(stream):  # where FSDP ran the hooks
            if self.settings.nonfinite == "nan":
                bad = (~torch.stack([part.finite for part in averaged]).all()).int()
                if self._shards.size > 1:  # the replicas of each shard know already
                    dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._shards.group)
                ok = bad == 0
            for part in averaged:
                part.commit(ok)
        if stream is not None:  # the state may be saved or moved next
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by sharded module. Every worker has its own state: save it on all workers."""
        modules = {
            name: {"layout": part.layout, "matrix": part.rows.matrix, "state": part.engine.state_dict()}
            for name, part in self._parts.items()
        }
        return {"shard": self._shards.rank, "shards": self._shards.size, "modules": modules}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `state` was not saved by such a hook, or has none of this model's sharded modules."""
        check_saved(state, self._parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, on all workers. State of other shards or parameters is dropped with a warning.

        A state that has none of this model's sharded modules raises ValueError.
        """

        def is_mine() -> bool:
            check_saved(state, self._parts)
            return (state["shard"], state["shards"]) == (self._shards.rank, self._shards.size)

        self._peers.operation = "hook.load_state_dict"
        same = all(self._peers.gather(is_mine))  # on all replicas or none: methods may share a part of it
        dropped = []
        for name, part in self._parts.items():
            saved = state["modules"].get(name)
            fits = saved is not None and saved["layout"] == part.layout
            if same and fits and saved["matrix"] == part.rows.matrix:
                part.engine.load_state_dict(saved["state"])
            else:
                dropped.append(name)
                empty: dict[str, Any] = {"units": {}, "methods": {}, "shared": {}, "own": {}}
                steps = saved["state"]["steps"] if saved else 0
                part.engine.load_state_dict(part.engine.state_dict() | empty | {"steps": steps})
        if dropped:
            warnings.warn(
                f"compression: {', '.join(dropped[:5])}{' …' if len(dropped) > 5 else ''} starts with empty error "
                f"feedback: the saved one is of shard {state['shard']} of {state['shards']}, of other parameters, or of a "
                "method for matrices while this one is not, or the reverse",
                stacklevel=2,
            )


def _refuse_other_hook(name: str, present: Any, hook: FSDP2Hook) -> None:
    """Raise ValueError if a module has an all-reduce hook that is not ours: it takes only one."""
    if isinstance(present, _ModuleHook) and present.hook is not hook:
        raise ValueError(
            "compress: this model is already compressed; call use() of its hook to change the method"
        )
    if present is not None and not isinstance(present, _ModuleHook):
        raise ValueError(f"compress: {name} already has an all-reduce hook, and supports only one")


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
        name: replace(
            settings, method=method, smallest=settings.smallest if method.layout == "matrices" else 0
        )
        for name, method in chosen.items()
    }


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


@dataclass(eq=False)
class _ModuleHook:
    """The all-reduce hook of one module that FSDP was applied to: averages the flat shard of its gradients in place."""

    hook: FSDP2Hook
    name: str
    layout: str
    module: Any
    engine: Engine
    rows: Rows
    numel: int | None = None  # of the last shard
    step: Step | None = None  # averaged, not committed yet
    stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def __call__(self, flat: Tensor) -> None:
        self.stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        if self.stream is not None:  # FSDP may free it before this stream is done
            flat.record_stream(self.stream)
        numel = self.rows.numel if self.rows.matrix else self.numel if self.engine.state.has_tensors else None
        if numel not in (None, flat.numel()):
            why = "after one of {:,}: other parameters were used than before, so the state does not fit"
            if self.rows.matrix:
                why = "instead of {:,}: not all parameters were used, so it is unknown to which matrices the gradients belong"
            raise ValueError(
                f"{self.name}: a shard of {flat.numel():,} gradients, {why.format(numel)}. Call set_reduce_scatter_unused_params(True) on the "
                "model, or use a method without state, such as BFloat16; after freezing parameters, call attach(model) of "
                "the hook"
            )
        self.numel = flat.numel()
        if self.step is not None:  # left by a backward pass that raised
            self.hook._averaged.remove(self)
        units = self._units() if self.engine.keeps_units or self.engine.state.has_error else {}
        gradients = self.rows.views(flat)
        self.engine.arrange(gradients)
        self.step = self.engine.begin(units, self.hook._scale or 1.0)
        self.step.add(gradients)
        self.step.finish(gradients)
        if self.hook._averaged:
            self.hook.meter.steps -= 1  # a backward pass is one step, not one for each module
        self.hook._averaged.append(self)
        Variable._execution_engine.queue_callback(self.hook._commit)  # the first call commits all

    @property
    def finite(self) -> Tensor:
        """Whether the shard was finite on all replicas."""
        assert self.step is not None
        return self.step.finite

    def commit(self, ok: Tensor | None) -> None:
        """Keep the step's state if `ok`."""
        assert self.step is not None
        self.step.commit(ok)
        self.step = None

    def _units(self) -> dict[str, float]:
        """Loss scale over learning rate, by name of the engine's tensors."""
        rates = [
            (float(group["lr"]), {id(p) for p in group["params"]})
            for optimizer, group in optimizer_groups(self.hook.optimizers, self.module)
            if updates_by_rate(optimizer)
        ]
        if not rates and self.hook.settings.scaler is None:
            return {}
        return self.rows.units(rates, self.hook._loss_scale())


def optimizer_groups(
    optimizers: Sequence[optim.Optimizer], module: Any
) -> list[tuple[optim.Optimizer, dict[str, Any]]]:
    """Optimizers and parameter groups that hold parameters of a sharded module."""
    mine = {id(p.sharded_param) for p in group_of(module).fsdp_params}
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    return [(optimizer, group) for optimizer, group in groups if any(id(p) in mine for p in group["params"])]


class Rows:
    """Tensors that the engine averages for one sharded module, as views of its flat shard.

    A method for matrices gets this worker's part of each trainable parameter, in its shape: some of the rows, where the
    first dimension is sharded. FSDP pads each part to the same number of rows on all workers; the padding is left out. A
    worker that has no rows takes part with one zero of its padding. Other methods get the shard as one vector.

    Args:
        name: Name of the module.
        module: A module that `fully_shard` was applied to.
        settings: Settings of the module, with one method.
        paths: Names of all modules of the model, by id.
        shard: This worker's shard and the number of shards.
    """

    def __init__(
        self, name: str, module: Any, settings: Settings, paths: Mapping[int, str], shard: tuple[int, int]
    ) -> None:
        self.settings = settings
        #: Whether the method is one for matrices.
        self.matrix = any(method.layout == "matrices" for method in settings.by_pattern.values())
        #: Elements of the flat shard if all parameters are used, padding included.
        self.numel = 0
        place = "[{}/{}]".format(*shard)  # part of the names: every shard draws its own random numbers
        rows: dict[str, _Place] = {}
        self._padded: dict[str, tuple[int, ...]] = {}
        trainable = [p for p in group_of(module).fsdp_params if p.sharded_param.requires_grad]
        for p in trainable:
            key = own_name(paths[id(p._module_info.module)], p._module_info.param_name) + place
            if p.sharded_size.numel():
                rows[key] = _Place(self.numel, p.sharded_size, [p])
            self._padded[key] = p.padded_sharded_param_size
            self.numel += p.padded_sharded_param_size.numel()
        whole = {name + place: _Place(0, (1,) if self.matrix else None, trainable)}
        self._places = rows if self.matrix and rows else whole

    @property
    def compressed(self) -> set[Method]:
        """Methods that compress some of the tensors, on the worker that has the most rows."""
        if not self.matrix:
            return set(self.settings.by_pattern.values())
        like = {name: torch.empty(shape, device="meta") for name, shape in self._padded.items()}
        return {batch.policy for batch in make_batches(self.settings, like)}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name."""
        return {
            name: flat if shape is None else flat[begin : begin + torch.Size(shape).numel()].view(shape)
            for name, (begin, shape, _) in self._places.items()
        }

    def units(self, rates: Sequence[tuple[float, set[int]]], scale: float) -> dict[str, float]:
        """Loss scale over learning rate of each tensor; 0 where its parameters have several rates.

        Args:
            rates: Learning rates, each with the ids of its parameters; others have the rate 1.
            scale: The loss scale.
        """
        units = {}
        for name, place in self._places.items():
            mine = {id(p.sharded_param) for p in place.parameters}
            known = {rate for rate, ids in rates if ids & mine} or {1.0}
            rate = known.pop() if len(known) == 1 else 0.0
            units[name] = scale / rate if rate else 0.0
        return units


class _Place(NamedTuple):
    """One tensor in a flat shard."""

    begin: int
    shape: tuple[int, ...] | None  # None: the whole shard
    parameters: list[Any]  # FSDP's, whose gradients it holds


def move_engine(engine: Engine, before: Rows, after: Rows) -> Engine:
    """Return an engine for other views of the same flat shard, with the position and error feedback of `engine`."""
    moved = Engine(after.settings, engine.transport)
    moved.state.steps, moved.state.scale = engine.state.steps, engine.state.scale
    errors = engine.state.errors()
    if errors:
        flat = next(iter(errors.values())).new_zeros(after.numel)
        for name, view in before.views(flat).items():
            if name in errors and errors[name].shape == view.shape:  # not if parameters were unused
                view.copy_(errors[name])
        known = set(engine.state.units.values())
        views = after.views(flat)
        moved.state.start_with(views, dict.fromkeys(views, known.pop() if len(known) == 1 else 0.0))
        moved.arrange(views)
    return moved


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
