"""`LocalSteps`: workers train alone for h updates, then average what they learned (local SGD, DiLoCo)."""

from __future__ import annotations

import copy
import glob
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..compression import Aggregator, Meter, NoCompression
from ..compression import settings as table
from ..compression.transport import Group
from ..distributed.workers import Workers
from ..layers.names import own_name, unwrap
from ..optim.by_name import check_optimizer, group_names, load_optimizer, optimizer_state

#: Makes the outer optimizer of the parameters that it is given.
Outer = Callable[[list[nn.Parameter]], optim.Optimizer]


class LocalSteps:
    """Average the model once in h updates, for links that are too slow for every gradient.

    Every worker trains a model of its own, without DDP. At every h-th `step` they average how far each has come
    from the anchor, the model that all shared last, and the outer optimizer takes that mean for its gradient.
    The anchor that it has moved is the model with which all go on. Without an outer optimizer that is the mean
    of the models (local SGD); Nesterov momentum, as in the example, makes it DiLoCo. The state of the optimizer
    inside stays each worker's own.

    Buffers in floats that a state dict holds, such as the running statistics of a batch norm, become their plain
    mean. All other buffers are rank 0's at the start and each worker's own from then on.

    When any worker has come to inf or NaN the round is lost: all go back to the anchor, with a warning. What that
    worker's own optimizer keeps is not mended: `pf.FiniteGuard` leaves such updates out before.

    Workers make equally many updates. After the last call `sync`, to end with one model. Call it before a
    switch too, which needs the same weights everywhere, and `start` after it:

        local.sync(model)
        if switch.step(model, optimizer, epoch=epoch):
            local.start(model)

    Args:
        h: updates from one average to the next.
        outer: makes the outer optimizer, of all the parameters in a list. Once started it is `local.outer`.
        method: compresses what is sent: one, or a mapping name pattern → method, as for `Aggregator`.
        group: a process group (default: all processes, or this one alone). Machines whose processes share a
            model, by DDP on a group of their own, give the module inside, and here the processes of one local
            rank on all machines.

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

    #: Tells `Checkpoint` to save every worker's model and optimizer, not rank 0's alone.
    trains_alone = True

    def __init__(
        self,
        h: int,
        *,
        outer: Outer | None = None,
        method: table.Methods | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(h, bool) or not isinstance(h, int) or h < 1:
            raise ValueError(f"LocalSteps: h={h!r} is not a number of updates; take 1 or more")
        if outer is not None and not callable(outer):
            raise TypeError(
                f"LocalSteps: outer is a {type(outer).__name__}, not a function that makes one of the parameters it is "
                "given, such as lambda params: torch.optim.SGD(params, lr=0.7)"
            )
        self.h = h
        self.method: table.Methods = NoCompression() if method is None else method
        self._group = Group(group)
        self.aggregator = Aggregator(self.method, self._group)
        for one in table.by_pattern(self.method).values():
            if one.kind == "vote" and outer is None:
                name = type(one).__name__
                raise ValueError(
                    f"LocalSteps: {name} knows no lengths; give an outer optimizer with a small lr"
                )
        self._make: Outer = outer or (lambda params: optim.SGD(params, lr=1.0))
        self.outer: optim.Optimizer | None = None
        self.updates = 0  # since the last average
        self.lost = 0  # rounds that were not finite
        self._anchor: dict[str, nn.Parameter] = {}  # in fp32 or better
        self._buffers: dict[str, Tensor] = {}  # the anchor's
        self._resumed: dict[str, Any] | None = None  # what was loaded, until the model is seen

    @property
    def meter(self) -> Meter:
        """What the averages have sent so far. The model that `start` sends is not counted."""
        return self.aggregator.meter

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Call it on all workers before the first update, and again when parameters were replaced.

        All get rank 0's parameters and buffers; after `load_state_dict` they go on from there instead. What the
        outer optimizer and the method keep of replaced parameters is dropped.
        """
        resumed, workers, inner = self._resumed, self._workers(model), unwrap(model)
        anchor, outer = workers.together(lambda: self._prepared(model, resumed))
        tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        form = [(own_name(name), tuple(x.shape), x.dtype, x.requires_grad) for name, x in tensors.items()]
        facts = (self.h, self.method, self.updates, resumed is None, form)
        workers.agree(repr(facts), 0, "h, method, model (names, shapes, dtypes) or what was loaded")
        if resumed is None:
            for x in tensors.values():
                x.copy_(workers.share(x.to(workers.device).contiguous(), 0))
            values, buffers = _trained(model), _statistics(model)
        else:
            values, buffers = resumed["anchor"], resumed["buffers"]
        for name, a in anchor.items():
            a.copy_(values[name])
        self._anchor = anchor
        self._buffers = {name: _wide(b).to(workers.device, copy=True) for name, b in buffers.items()}
        self.outer = outer if self.outer is None else _refilled(self.outer, outer)
        if resumed is not None:
            load_optimizer(self.outer, _names(anchor), resumed["outer"])
        exact = {glob.escape(name): NoCompression() for name in self._buffers}
        self.aggregator.use(exact | table.by_pattern(self.method))
        self._resumed = None

    def step(self, model: nn.Module) -> bool:
        """Call it after every update, on all workers. True when they have averaged just now."""
        if self._resumed is not None:
            self.start(model)
        due = self.updates + 1 >= self.h
        if not due:
            self._mine(model)  # tells of replaced parameters now; `sync` asks all workers
        self.updates += 1
        return due and self.sync(model)

    @torch.no_grad()
    def sync(self, model: nn.Module) -> bool:
        """Average now, on all workers. False when there was nothing new to average."""
        if self._resumed is not None:
            self.start(model)
        workers = self._workers(model)
        mine = workers.together(lambda: self._mine(model))
        workers.agree(repr(self.updates), 0, "the number of updates since the last average")
        if self.updates == 0:
            return False
        anchor: dict[str, Tensor] = {**self._anchor, **self._buffers}
        learned = {name: _difference(anchor[name], x) for name, x in mine.items()}
        means = self.aggregator(learned)
        self.updates = 0
        if _finite(means):
            self._move(means)
        else:
            self.lost += 1
            whose = "another worker" if _finite(learned) else "this worker"
            warnings.warn(
                f"LocalSteps, average {self.aggregator.steps}: not finite, by {whose}; all go back to the last one",
                RuntimeWarning,
                stacklevel=2,
            )
        for name, x in mine.items():
            x.copy_(anchor[name])
        return True

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by parameter name.

        Every worker has an optimizer of its own, and between two averages a model: save all three on each of them,
        as `pf.Checkpoint(…, compressor=local)` does.
        """
        aggregator = self.aggregator.state_dict()
        if self._resumed is not None:
            return self._resumed | {"aggregator": aggregator}
        return {
            "updates": self.updates,
            "lost": self.lost,
            "anchor": {name: a.detach() for name, a in self._anchor.items()},
            "buffers": dict(self._buffers),
            "outer": self.outer and optimizer_state(self.outer, _names(self._anchor)),
            "aggregator": aggregator,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there at the next `start` or `step`, on all workers, each with its own model."""
        missing = {"updates", "lost", "anchor", "buffers", "outer", "aggregator"} - state.keys()
        if missing:
            raise ValueError(f"this is no state of LocalSteps: it lacks {', '.join(sorted(missing))}")
        self.aggregator.load_state_dict(state["aggregator"])
        own = copy.deepcopy({key: value for key, value in state.items() if key != "aggregator"})
        self.updates, self.lost = own["updates"], own["lost"]
        self._resumed = own if own["anchor"] else None

    def _workers(self, model: nn.Module) -> Workers:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        return Workers(self._group.group, device, "LocalSteps")

    def _prepared(
        self, model: nn.Module, resumed: Mapping[str, Any] | None
    ) -> tuple[dict[str, nn.Parameter], optim.Optimizer]:
        """An anchor for the model and an outer optimizer for the anchor, if all is well. Changes nothing."""
        _refuse(model)
        params = _trained(model)
        table.refuse_unmatched(self.method, params)
        if resumed is not None:
            _compare(params, resumed["anchor"], "was saved", "give the model as it was saved")
        elif self.updates:
            raise ValueError(
                f"LocalSteps: {self.updates} updates since the last average would be lost; call local.sync(model) "
                "before start, and before parameters are replaced"
            )
        anchor = {name: _kept(self._anchor.get(name), p) for name, p in params.items()}
        outer = self._make(list(anchor.values()))
        kind = type(outer).__name__
        if not isinstance(outer, optim.Optimizer) or isinstance(outer, optim.LBFGS):
            raise TypeError(
                f"LocalSteps: outer= made a {kind}, not an optimizer that steps by gradients alone"
            )
        groups = group_names(outer, _names(anchor))
        for name in anchor.keys() - {name for group in groups for name in group}:
            raise ValueError(f"LocalSteps: the outer {kind} does not hold {name}; give it all parameters")
        for one in table.by_pattern(self.method).values():
            if one.has_momentum and any(g.get("momentum") or "betas" in g for g in outer.param_groups):
                name = type(one).__name__
                raise ValueError(
                    f"LocalSteps: {name} and the outer {kind} both have momentum; take it from one"
                )
        if self.outer is not None and len(self.outer.param_groups) != len(groups):
            raise ValueError(
                f"LocalSteps: the outer {kind} has another number of groups than before; make as many"
            )
        if resumed is not None:
            check_optimizer(resumed["outer"], kind, groups)
        return anchor, outer

    def _mine(self, model: nn.Module) -> dict[str, Tensor]:
        """What is averaged of this model, which must be like the anchor."""
        if not self._anchor:
            raise ValueError("LocalSteps: call local.start(model) on all workers, before the first update")
        buffers = {own_name(name): b for name, b in unwrap(model).named_buffers()}
        mine = {**_trained(model), **{name: b for name, b in buffers.items() if name in self._buffers}}
        todo = "call local.sync(model) before parameters are replaced, and local.start(model) after"
        _compare(mine, {**self._anchor, **self._buffers}, "was started", todo)
        return mine

    def _move(self, means: Mapping[str, Tensor]) -> None:
        """The anchor's parameters take the outer step, its buffers become the mean."""
        assert self.outer is not None
        for name, b in self._buffers.items():
            b.sub_(means[name])
        for name, a in self._anchor.items():
            a.grad = means[name]
        self.outer.step()
        self.outer.zero_grad()


def _refuse(model: nn.Module) -> None:
    """What cannot be trained in local steps."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise TypeError(
                "LocalSteps: DistributedDataParallel averages every gradient already; give the bare module"
            )
        if "_fsdp_wrapped_module" in module._modules:
            raise TypeError(
                "LocalSteps: the model is sharded by FSDP; every worker needs the whole bare module"
            )
    params = _trained(model)
    if not params:
        raise ValueError("LocalSteps: no parameter of the model requires a gradient, so none is averaged")
    device = next(iter(params.values())).device
    for name, p in params.items():
        if isinstance(p, DTensor):
            raise TypeError(f"LocalSteps: {name} is a DTensor; every worker needs the whole bare module")
        if not p.is_floating_point() or p.device != device:
            raise TypeError(f"LocalSteps: {name} is {p.dtype} on {p.device}; all must be floats on {device}")


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {own_name(name): p for name, p in unwrap(model).named_parameters() if p.requires_grad}


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that have a mean: not counters, caches, nor masks of infinities."""
    inner = unwrap(model)
    saved = inner.state_dict().keys()
    floats = {name: b for name, b in inner.named_buffers() if b.is_floating_point() and name in saved}
    return {own_name(name): b for name, b in floats.items() if bool(b.isfinite().all())}


def _compare(here: Mapping[str, Tensor], there: Mapping[str, Tensor], when: str, todo: str) -> None:
    """Whether the model has the tensors that it had."""
    for name in [*here, *there]:
        a, b = here.get(name), there.get(name)
        if a is None or b is None or a.shape != b.shape:
            raise ValueError(
                f"LocalSteps: {name} is {_form(a)}, and was {_form(b)} when the model {when}; {todo}"
            )


def _form(x: Tensor | None) -> str:
    return "not there" if x is None else "×".join(map(str, x.shape)) or "one number"


def _refilled(outer: optim.Optimizer, new: optim.Optimizer) -> optim.Optimizer:
    """The same object, for whatever schedules it, with the parameters of another."""
    for group, other in zip(outer.param_groups, new.param_groups, strict=True):
        group["params"] = other["params"]
    held = {p for group in outer.param_groups for p in group["params"]}
    for gone in outer.state.keys() - held:
        del outer.state[gone]
    return outer


def _kept(anchor: nn.Parameter | None, p: nn.Parameter) -> nn.Parameter:
    """The anchor of a parameter: the present one, which the outer optimizer has state for, or a new one."""
    wide = _wide(p)
    if anchor is not None and (anchor.shape, anchor.dtype, anchor.device) == (p.shape, wide.dtype, p.device):
        return anchor
    return nn.Parameter(wide.clone())


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _difference(anchor: Tensor, x: Tensor) -> Tensor:
    """How far x has come from the anchor as x began with it: what 16 bits had cut off, no worker has learned."""
    return anchor.to(x.dtype).to(anchor.dtype) - x.to(anchor.device)


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return bool(torch.stack([x.isfinite().all() for x in tensors.values()]).all())


def _names(anchor: Mapping[str, nn.Parameter]) -> dict[int, str]:
    return {id(a): name for name, a in anchor.items()}
