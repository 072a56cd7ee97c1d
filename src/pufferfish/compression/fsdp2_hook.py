"""`FSDP2Hook`: gradients of a model sharded by FSDP2, averaged between its replicas with fewer bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..distributed.workers import Workers
from ..optim.carry import Optimizers, as_list
from .engine import Engine, Step
from .exchange import Group
from .fsdp2_modules import (
    check_replicas,
    check_saved,
    choose_settings,
    group_of,
    layout_of,
    module_paths,
    optimizer_groups,
    sharded_modules,
)
from .fsdp2_rows import Rows, move_engine
from .meter import Meter
from .method import Method
from .settings import Methods, Settings
from .state import updates_by_rate

T = TypeVar("T")


def compress_fsdp2(
    model: nn.Module,
    settings: Callable[[], Settings],
    replicas: dist.ProcessGroup | None,
    *,
    optimizer: Optimizers = None,
    scaler: Any = None,
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
        optimizer, scaler: See `compress`. The learning rate counts if it is the same for a whole sharded module.

    >>> from pufferfish.compression import BFloat16
    >>> compress_fsdp2(nn.Linear(2, 2), lambda: Settings(BFloat16()), None)
    Traceback (most recent call last):
    TypeError: compress: a Linear is not sharded; apply fully_shard first, with a 1-D mesh
    """
    modules, mesh = sharded_modules(model)
    check_replicas(replicas, mesh)
    assert replicas is not None
    hook = FSDP2Hook(replicas, mesh, as_list(optimizer), scaler)

    def checked() -> Settings:
        chosen = settings()
        matrices = any(method.matrix for method in chosen.by_pattern.values())
        smallest = chosen.smallest if matrices else 1024
        if chosen != replace(chosen, scope="layer", hierarchy="flat", smallest=smallest, overlap=None):
            raise ValueError(
                "compress: under FSDP2 leave scope, hierarchy and overlap at their defaults, and smallest too unless the "
                "method is for matrices: shards have no layers, are sent one by one and are already averaged inside a replica"
            )
        return chosen

    hook._attach(modules, module_paths(model), hook._run_on_all(checked))
    return hook


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
        self,
        replicas: dist.ProcessGroup,
        mesh: DeviceMesh,
        optimizers: list[optim.Optimizer],
        scaler: Any,
    ) -> None:
        device = torch.device(mesh.device_type)
        self.optimizers, self.scaler = optimizers, scaler
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
        return self.settings.method

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
            self._scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
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
        if not rates and self.hook.scaler is None:
            return {}
        return self.rows.units(rates, self.hook._loss_scale())


def _refuse_other_hook(name: str, present: Any, hook: FSDP2Hook) -> None:
    """Raise ValueError if a module has an all-reduce hook that is not ours: it takes only one."""
    if isinstance(present, _ModuleHook) and present.hook is not hook:
        raise ValueError(
            "compress: this model is already compressed; call use() of its hook to change the method"
        )
    if present is not None and not isinstance(present, _ModuleHook):
        raise ValueError(f"compress: {name} already has an all-reduce hook, and supports only one")
