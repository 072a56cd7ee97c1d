"""`LocalSteps`: each worker makes h updates on its own, then all average their models (local SGD, DiLoCo)."""

import copy
import glob
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from ..compression import Engine, Meter, NoCompression, Settings
from ..compression.exchange import Group
from ..compression.settings import Methods
from ..distributed.workers import Workers
from ..layers.names import own_name, unwrap
from ..optim.by_name import check_optimizer, group_names, load_optimizer, optimizer_state
from .averaged_tensors import averaged_buffers, check_model, check_shapes, trainable_parameters

#: Creates the outer optimizer for the given parameters.
Outer = Callable[[list[nn.Parameter]], optim.Optimizer]


class LocalSteps:
    """Average the model every h updates, for links that are too slow to send every gradient.

    Every worker trains its own copy of the model, without DDP. At every h-th `step` the workers average their
    differences from the anchor, the last model that all shared. The outer optimizer takes that mean as the
    gradient of the anchor, and all workers continue from the updated anchor. Without an outer optimizer it is the
    mean of the models (local SGD); with Nesterov momentum, as in the example, this is DiLoCo. The state of the
    inner optimizer is not averaged.

    Floating-point buffers in the state dict, such as the running statistics of a batch norm, are averaged. Other
    buffers are broadcast from worker 0 at the start and not synchronized afterwards.

    If the model of any worker is not finite, the round is discarded: all workers return to the anchor, with a
    warning. The state of that worker's optimizer is not repaired; `pf.FiniteGuard` skips such updates before.

    All workers make the same number of updates. Call `sync` at the end, so that all have the same model, and
    before a switch, which needs equal weights; call `start` after the switch:

        local.sync(model)
        if switch.step(model, optimizer, epoch=epoch):
            local.start(model)

    Args:
        h: number of updates between two averages.
        outer: creates the outer optimizer from the list of all parameters. After `start` it is `local.outer`.
        method: compression method of the averages, or a mapping from name patterns to methods, as in `Settings`.
        group: process group (default: all processes, or this one if there is no group). Where the processes of a
            machine train one model by DDP on a group of their own, pass `ddp.module` as the model and, as the
            group, the processes with the same local rank on all machines.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = optim.SGD(model.parameters(), lr=0.1)
    >>> local = LocalSteps(2, outer=lambda params: optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True))
    >>> local.start(model)
    >>> for _ in range(4):
    ...     model(torch.ones(2)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     print(local.step(model), end=" ")
    False True False True
    """

    #: Makes `Checkpoint` save the model and optimizer of every worker, not only of worker 0.
    has_model_per_worker = True

    def __init__(
        self,
        h: int,
        *,
        outer: Outer | None = None,
        method: Methods | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(h, bool) or not isinstance(h, int) or h < 1:
            raise ValueError(f"LocalSteps: h={h!r} is not a number of updates; pass an int of at least 1")
        if outer is not None and not callable(outer):
            raise TypeError(
                f"LocalSteps: outer is a {type(outer).__name__}; pass a function that creates the optimizer, such as "
                "lambda params: torch.optim.SGD(params, lr=0.7)"
            )
        self.h = h
        self.method: Methods = NoCompression() if method is None else method
        self._group = Group(group)
        self._group.operation = "LocalSteps.sync"
        self._settings = Settings(self.method)
        self.engine = Engine(self._settings, self._group)
        for one in self._settings.by_pattern.values():
            if one.kind == "vote" and outer is None:
                name = type(one).__name__
                raise ValueError(
                    f"LocalSteps: {name} sends signs without magnitudes; pass an outer optimizer with a small lr"
                )
        self._make_outer: Outer = outer or (lambda params: optim.SGD(params, lr=1.0))
        self.outer: optim.Optimizer | None = None
        self.updates = 0  # number since the last average
        self.lost = 0  # number of rounds discarded because they were not finite
        self._anchor: dict[str, nn.Parameter] = {}  # in fp32 or wider
        self._buffers: dict[str, Tensor] = {}  # the anchor's
        self._resumed: dict[str, Any] | None = None  # loaded state, until the next `start`

    @property
    def meter(self) -> Meter:
        """Bytes sent by the averages so far. The broadcast in `start` is not counted."""
        return self.engine.meter

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Set the anchor. Call it on all workers before the first update, and again after parameters are replaced.

        All workers get the parameters and buffers of worker 0, unless state was loaded with `load_state_dict`. The
        state of the outer optimizer and of the compression method for replaced parameters is dropped.
        """
        resumed, workers, inner = self._resumed, self._workers(model, "start"), unwrap(model)
        anchor, outer = workers.run_on_all(lambda: self._prepare(model, resumed))
        tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        layout = [(own_name(name), tuple(x.shape), x.dtype, x.requires_grad) for name, x in tensors.items()]
        facts = (self.h, self.method, self.updates, resumed is None, layout)
        workers.agree(repr(facts), 0, "h, method, model (names, shapes, dtypes) or loaded state")
        if resumed is None:
            for x in tensors.values():
                x.copy_(workers.broadcast_tensor(x.to(workers.device).contiguous(), 0))
            values, buffers = trainable_parameters(model), averaged_buffers(model)
        else:
            values, buffers = resumed["anchor"], resumed["buffers"]
        for name, a in anchor.items():
            a.copy_(values[name])
        self._anchor = anchor
        self._buffers = {name: _at_least_fp32(b).to(workers.device, copy=True) for name, b in buffers.items()}
        self.outer = outer if self.outer is None else _with_params_of(self.outer, outer)
        if resumed is not None:
            load_optimizer(self.outer, _names(anchor), resumed["outer"])
        exact = {glob.escape(name): NoCompression() for name in self._buffers}
        self.engine.use(Settings(exact | self._settings.by_pattern))
        self._resumed = None

    def step(self, model: nn.Module) -> bool:
        """Count one update and average if it is the h-th. Call it after every update, on all workers.

        Returns:
            Whether the models were averaged.
        """
        if self._resumed is not None:
            self.start(model)
        due = self.updates + 1 >= self.h
        if not due:
            self._local_tensors(model)  # raises at once if parameters were replaced
        self.updates += 1
        return due and self.sync(model)

    @torch.no_grad()
    def sync(self, model: nn.Module) -> bool:
        """Average now, on all workers. Returns False if there was no update since the last average."""
        if self._resumed is not None:
            self.start(model)
        workers = self._workers(model, "sync")
        tensors = workers.run_on_all(lambda: self._local_tensors(model))
        workers.agree(repr(self.updates), 0, "the number of updates since the last average")
        if self.updates == 0:
            return False
        anchor: dict[str, Tensor] = {**self._anchor, **self._buffers}
        differences = {name: _difference(anchor[name], x) for name, x in tensors.items()}
        means = self.engine.average(differences)
        self.updates = 0
        if _finite(means):
            self._outer_step(means)
        else:
            self.lost += 1
            source = "another worker" if _finite(differences) else "this worker"
            warnings.warn(
                f"LocalSteps, average {self.engine.steps}: the model of {source} is not finite; all workers "
                "return to the last averaged model",
                RuntimeWarning,
                stacklevel=2,
            )
        for name, x in tensors.items():
            x.copy_(anchor[name])
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings, by parameter name.

        Between two averages models and optimizers differ between workers: save them on each of them, as
        `pf.Checkpoint(…, compressor=local)` does.
        """
        engine = self.engine.state_dict()
        if self._resumed is not None:
            return self._resumed | {"engine": engine}
        return {
            "updates": self.updates,
            "lost": self.lost,
            "anchor": {name: a.detach() for name, a in self._anchor.items()},
            "buffers": dict(self._buffers),
            "outer": self.outer and optimizer_state(self.outer, _names(self._anchor)),
            "engine": engine,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; it takes effect at the next `start` or `step`, on all workers."""
        missing = {"updates", "lost", "anchor", "buffers", "outer", "engine"} - state.keys()
        if missing:
            raise ValueError(f"not a state of LocalSteps: missing {', '.join(sorted(missing))}")
        self.engine.load_state_dict(state["engine"])
        own = copy.deepcopy({key: value for key, value in state.items() if key != "engine"})
        self.updates, self.lost = own["updates"], own["lost"]
        self._resumed = own if own["anchor"] else None

    def _workers(self, model: nn.Module, method: str) -> Workers:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        return Workers(self._group.group, device, f"LocalSteps.{method}")

    def _prepare(
        self, model: nn.Module, resumed: Mapping[str, Any] | None
    ) -> tuple[dict[str, nn.Parameter], optim.Optimizer]:
        """Check the model, and return its anchor and an outer optimizer for it. Changes nothing."""
        check_model(model)
        params = trainable_parameters(model)
        self._settings.check_patterns(params)
        if resumed is not None:
            check_shapes(params, resumed["anchor"], "was saved", "build the model as it was saved")
        elif self.updates:
            raise ValueError(
                f"LocalSteps: {self.updates} updates since the last average would be lost; call local.sync(model) "
                "before start, and before parameters are replaced"
            )
        anchor = {name: _anchor_for(self._anchor.get(name), p) for name, p in params.items()}
        outer = self._make_outer(list(anchor.values()))
        kind = type(outer).__name__
        if not isinstance(outer, optim.Optimizer) or isinstance(outer, optim.LBFGS):
            raise TypeError(
                f"LocalSteps: outer= created a {kind}, which is not an optimizer that steps without a closure"
            )
        groups = group_names(outer, _names(anchor))
        for name in anchor.keys() - {name for group in groups for name in group}:
            raise ValueError(f"LocalSteps: the outer {kind} does not have {name}; pass it all parameters")
        for one in self._settings.by_pattern.values():
            if one.has_momentum and any(g.get("momentum") or "betas" in g for g in outer.param_groups):
                name = type(one).__name__
                raise ValueError(
                    f"LocalSteps: {name} and the outer {kind} both have momentum; use it in one of them"
                )
        if self.outer is not None and len(self.outer.param_groups) != len(groups):
            raise ValueError(
                f"LocalSteps: the outer {kind} has {len(groups)} parameter groups, before it had "
                f"{len(self.outer.param_groups)}; outer= must create the same groups"
            )
        if resumed is not None:
            check_optimizer(resumed["outer"], kind, groups)
        return anchor, outer

    def _local_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of this model to average; ValueError if they differ in shape from the anchor."""
        if not self._anchor:
            raise ValueError("LocalSteps: call local.start(model) on all workers, before the first update")
        buffers = {own_name(name): b for name, b in unwrap(model).named_buffers()}
        buffers = {name: b for name, b in buffers.items() if name in self._buffers}
        tensors: dict[str, Tensor] = {**trainable_parameters(model), **buffers}
        remedy = "call local.sync(model) before parameters are replaced, and local.start(model) after"
        check_shapes(tensors, {**self._anchor, **self._buffers}, "was started", remedy)
        return tensors

    def _outer_step(self, means: Mapping[str, Tensor]) -> None:
        """Update the anchor: its parameters by the outer optimizer, its buffers to the mean."""
        assert self.outer is not None
        for name, b in self._buffers.items():
            b.sub_(means[name])
        for name, a in self._anchor.items():
            a.grad = means[name]
        self.outer.step()
        self.outer.zero_grad()


def _with_params_of(outer: optim.Optimizer, new: optim.Optimizer) -> optim.Optimizer:
    """Return `outer`, which a scheduler may refer to, with the parameters of `new`."""
    for group, other in zip(outer.param_groups, new.param_groups, strict=True):
        group["params"] = other["params"]
    present = {p for group in outer.param_groups for p in group["params"]}
    for p in outer.state.keys() - present:
        del outer.state[p]
    return outer


def _anchor_for(anchor: nn.Parameter | None, p: nn.Parameter) -> nn.Parameter:
    """Return the anchor of a parameter: the present one, to which outer optimizer state belongs, or a new one."""
    wide = _at_least_fp32(p)
    if anchor is not None and (anchor.shape, anchor.dtype, anchor.device) == (p.shape, wide.dtype, p.device):
        return anchor
    return nn.Parameter(wide.clone())


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _difference(anchor: Tensor, x: Tensor) -> Tensor:
    """Return anchor − x, without the rounding error that the worker's copy of the anchor started with."""
    return anchor.to(x.dtype).to(anchor.dtype) - x.to(anchor.device)


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return bool(torch.stack([x.isfinite().all() for x in tensors.values()]).all())


def _names(anchor: Mapping[str, nn.Parameter]) -> dict[int, str]:
    return {id(a): name for name, a in anchor.items()}
