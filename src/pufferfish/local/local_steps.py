"""`LocalSteps`: each worker makes h updates on its own, then all average their models (local SGD, DiLoCo)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from ..compression import Meter, NoCompression, Settings
from ..compression.exchange import Group, Transport
from ..compression.settings import Methods
from ..distributed.workers import Workers
from ..layers.names import own_name, unwrap
from .anchor import Anchor, Outer
from .averaged_tensors import (
    averaged_buffers,
    check_model,
    check_shapes,
    inside_groups,
    local_part,
    trainable_parameters,
)
from .flight import separate_group
from .fragment import Fragment, move_engine_states
from .rounds import UPDATES, Rounds
from .schedule import Schedule
from .split_by_depth import split_by_depth

T = TypeVar("T")


class LocalSteps:
    """Average the model every h updates, for links that are too slow to send every gradient.

    Every worker trains its own copy of the model, without DDP. At every h-th `step` the workers average their
    differences from the anchor, the last model that all shared. The outer optimizer takes that mean as the
    gradient of the anchor, and all workers continue from the updated anchor. Without an outer optimizer the result is
    the mean of the models (local SGD); with Nesterov momentum, as in the example, this is DiLoCo. The state of the
    inner optimizer is not averaged.

    With `fragments` and `delay` this is Streaming DiLoCo: each fragment of the model is averaged every h updates, at a
    moment of its own, and sent while training continues. The average is applied `delay` updates later: the outer
    optimizer updates the fragment of the anchor, and the worker continues from
    mixing · (its own parameters) + (1 − mixing) · anchor.

    Floating-point buffers in the state dict, such as the running statistics of a batch norm, are averaged. Other
    buffers are broadcast from worker 0 at the start and not synchronized afterwards.

    If the model of any worker is not finite, the round is discarded: all workers return to the anchor, with a
    warning. Finite averages that are on their way are still applied. The state of that worker's optimizer is not
    repaired; `pf.FiniteGuard` skips the updates that cause this.

    All workers make the same number of updates. Call `sync` at the end, so that all have the same model, and
    before a switch, which needs equal weights; call `start` after the switch::

        local.sync(model)
        if switch.step(model, optimizer, epoch=epoch, group=dist.group.WORLD):
            local.start(model)

    Several workers may train each replica of the model together, by DDP or FSDP2 (`fully_shard`) on groups of their
    own. Pass that model to all methods, and as `group` the workers with the same position in all replicas.

    Args:
        h: number of updates between two averages of a tensor.
        outer: creates the outer optimizer from the list of all parameters. After `start` it is `local.outer`. It
            updates one fragment at a time: parameters without a gradient must stay unchanged.
        method: compression method of the averages, or a mapping from name patterns to methods, as in `Settings`.
        group: process group (default: all processes, or this one if there is no group).
        fragments: number of parts of about equal size that are averaged one after the other. At most h.
        delay: number of updates from sending a fragment to applying its average. Below h. With a delay, all workers
            of the group create the object together: averages have a process group of their own.
        mixing: share of the worker's own parameters that it keeps when a delayed average is applied.
            Default: 0.5 with a delay, 0 without.

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
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
    ) -> None:
        mixing = (0.5 if delay else 0.0) if mixing is None else mixing
        self.schedule = Schedule(h=h, fragments=fragments, delay=delay, mixing=mixing)
        self.method: Methods = NoCompression() if method is None else method
        self._settings = Settings(self.method)
        for one in self._settings.by_pattern.values():
            if one.kind == "vote" and outer is None:
                name = type(one).__name__
                raise ValueError(
                    f"LocalSteps: {name} sends signs without magnitudes; pass an outer optimizer with a small lr"
                )
        self._make_outer: Outer = outer or (lambda params: optim.SGD(params, lr=1.0))
        self._transport = self._make_transport(group, delay)
        self._transport.operation = "LocalSteps.sync"
        self._rounds = Rounds(self.schedule, self._transport)
        self._phase = 0  # number of updates since `start` or `sync`, modulo h
        self._anchor: Anchor | None = None
        self._resumed: dict[str, Any] | None = None  # loaded state, until the next `start`

    @property
    def outer(self) -> optim.Optimizer | None:
        """The outer optimizer; None before `start`."""
        return None if self._anchor is None else self._anchor.outer

    @property
    def lost(self) -> int:
        """Number of averages discarded because they were not finite."""
        return self._rounds.lost

    @property
    def waited(self) -> float:
        """Seconds that this worker has waited for averages instead of training."""
        return self._rounds.waited

    @property
    def applied_bytes(self) -> float:
        """Bytes on the wire of the averages applied so far: unlike those of `meter`, independent of what is on its way."""
        return self._rounds.applied_bytes

    @property
    def meter(self) -> Meter:
        """Bytes sent by the averages so far, one step for each fragment. The broadcast in `start` is not counted."""
        return self._transport.meter

    @property
    def updates(self) -> int:
        """Number of updates since the last average; with fragments, the largest of their numbers."""
        return max((fragment.since for fragment in self._rounds.fragments), default=0)

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Set the anchor. Call it on all workers before the first update, and again after parameters are replaced.

        All workers get the parameters and buffers of worker 0, unless state was loaded with `load_state_dict`. The
        state of the outer optimizer and of the compression method for replaced parameters is dropped.
        """
        resumed, workers, inner = self._resumed, self._workers(model, "start"), unwrap(model)
        workers.run_on_all(lambda: check_model(model, self._transport.group))
        self._rounds.inside = [Workers(g, workers.device, "LocalSteps.start") for g in inside_groups(model)]
        anchor = self._run_on_all(workers, lambda: self._prepare(model, resumed))
        tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        layout = [
            (own_name(name), local_part(x).shape, x.dtype, x.requires_grad) for name, x in tensors.items()
        ]
        facts = (self.schedule, self.method, self._phase, resumed is None, layout)
        about = "h, the other arguments, the model (names, shapes, dtypes) or loaded state"
        self._run_on_all(None, lambda: workers.agree(repr(facts), 0, about))
        if resumed is None:
            for x in map(local_part, tensors.values()):
                x.copy_(workers.broadcast_tensor(x.to(workers.device).contiguous(), 0))
            anchor.fill(_local_parts(trainable_parameters(model)), averaged_buffers(model), workers.device)
        else:
            anchor.fill(resumed["anchor"], resumed["buffers"], workers.device)
            anchor.load_outer_state(resumed["outer"])
        self._anchor = self._rounds.anchor = anchor
        self._resumed = None
        self._make_fragments(model, anchor, resumed)

    @torch.no_grad()
    def step(self, model: nn.Module) -> bool:
        """Count one update and average what is due. Call it after every update, on all workers.

        Returns:
            Whether an average was applied to the model, or to a fragment of it.
        """
        if self._resumed is not None:
            self.start(model)
        phase = (self._phase + 1) % self.schedule.h
        due = [self._rounds.fragments[p] for p in self.schedule.due(phase)] if self._rounds.fragments else []
        if self.schedule.delay or not due:
            tensors = self._local_tensors(model)  # raises at once if parameters were replaced
        self._phase = phase
        landing = self._rounds.count_update()
        if not self.schedule.delay:
            return bool(due) and self._average(model, due)
        for fragment in due:
            self._rounds.send(fragment, tensors, repr((phase, fragment.since)))
        self._rounds.land(landing, tensors)
        return bool(landing)

    @torch.no_grad()
    def sync(self, model: nn.Module) -> bool:
        """Average now, on all workers. Returns False if there was no update since the last average.

        Averages on their way are applied first. Then all workers have the same model, and the schedule starts again.
        """
        if self._resumed is not None:
            self.start(model)
        averaged = self._average(model, self._rounds.fragments)
        self._phase = 0
        return averaged

    def wait(self) -> None:
        """Wait for averages on their way. They are applied when they are due."""
        self._rounds.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings, by parameter name. Waits for averages on their way.

        Between two averages models and optimizers differ between workers: save them on each of them, as
        `pf.Checkpoint(…, compressor=local)` does.
        """
        if self._resumed is not None:
            return self._resumed
        anchor = self._anchor.state_dict() if self._anchor else dict.fromkeys(("anchor", "buffers", "outer"))
        return {
            "h": self.schedule.h,
            "delay": self.schedule.delay,
            "phase": self._phase,
            "lost": self.lost,
            "fragments": [fragment.state_dict() for fragment in self._rounds.fragments],
            **anchor,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` cannot load `state`. Changes nothing."""
        missing = {"h", "delay", "phase", "lost", "anchor", "buffers", "outer", "fragments"} - state.keys()
        if missing:
            raise ValueError(f"not a state of LocalSteps: missing {', '.join(sorted(missing))}")
        saved, now = state["fragments"], self.schedule
        if saved and len(saved) != now.fragments:
            raise ValueError(
                f"LocalSteps: saved with fragments={len(saved)}, now fragments={now.fragments}; pass the saved number"
            )
        if (state["h"], state["delay"]) != (now.h, now.delay) and any(f["flight"] for f in saved):
            raise ValueError(
                f"LocalSteps: saved with h={state['h']}, delay={state['delay']} and averages on their way, now h={now.h}, "
                f"delay={now.delay}; resume with the same values, or call local.sync(model) before saving"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; it takes effect at the next `start` or `step`, on all workers."""
        self.check_state_dict(state)
        self._phase, self._rounds.lost = state["phase"] % self.schedule.h, state["lost"]
        self._resumed = copy.deepcopy(dict(state)) if state["anchor"] else None

    def _make_transport(self, group: dist.ProcessGroup | None, delay: int) -> Transport:
        transport = Group(group)
        return Group(separate_group(transport.group)) if delay else transport

    def _workers(self, model: nn.Module, method: str) -> Workers:
        self._rounds.wait()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        return Workers(self._transport.group, device, f"LocalSteps.{method}")

    def _run_on_all(self, workers: Workers | None, work: Callable[[], T]) -> T:
        """Run `work`; an error on one worker is raised on all of `workers` and of its replica."""
        for some in [workers, *self._rounds.inside] if workers else self._rounds.inside:
            work = partial(some.run_on_all, work)
        return work()

    def _prepare(self, model: nn.Module, resumed: Mapping[str, Any] | None) -> Anchor:
        """Check what does not fit the model, and return an anchor for it, still without values. Changes nothing."""
        params = _local_parts(trainable_parameters(model))
        self._settings.check_patterns(params)
        if resumed is not None:
            check_shapes(params, resumed["anchor"], "was saved", "build the model as it was saved")
        elif self.updates or any(fragment.flight for fragment in self._rounds.fragments):
            raise ValueError(
                f"LocalSteps: {self.updates} updates since the last average, and averages on their way, would be lost; "
                "call local.sync(model) before start, and before parameters are replaced"
            )
        else:
            self._split(model)
        anchor = Anchor(self._make_outer, params, self._settings, self._anchor)
        if resumed is not None:
            anchor.check_outer_state(resumed["outer"])
        return anchor

    def _split(self, model: nn.Module) -> list[list[str]]:
        tensors = {**trainable_parameters(model), **averaged_buffers(model)}
        sizes = {name: x.numel() for name, x in tensors.items()}  # of a DTensor, that of all shards
        return split_by_depth(sizes, self.schedule.fragments)

    def _make_fragments(self, model: nn.Module, anchor: Anchor, resumed: Mapping[str, Any] | None) -> None:
        """Divide the model. Error feedback goes along with tensors that move to another fragment."""
        saved = resumed["fragments"] if resumed else [f.state_dict() for f in self._rounds.fragments]
        split = [f["names"] for f in saved] if resumed else self._split(model)
        self._rounds.fragments = [Fragment(n, self._settings, anchor.buffers, self._transport) for n in split]
        shapes = {name: x.shape for name, x in anchor.tensors().items()}
        for fragment, state in zip(self._rounds.fragments, saved, strict=False):
            if not resumed:
                mine = {name: shapes[name] for name in fragment.names}
                state = state | {"engine": move_engine_states([f["engine"] for f in saved], mine)}
            fragment.load_state_dict(state)

    def _local_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of this model to average; ValueError if they differ in shape from the anchor."""
        if self._anchor is None:
            raise ValueError("LocalSteps: call local.start(model) on all workers, before the first update")
        buffers = {own_name(name): b for name, b in unwrap(model).named_buffers()}
        buffers = {name: b for name, b in buffers.items() if name in self._anchor.buffers}
        tensors = _local_parts({**trainable_parameters(model), **buffers})
        remedy = "call local.sync(model) before parameters are replaced, and local.start(model) after"
        check_shapes(tensors, self._anchor.tensors(), "was started", remedy)
        return tensors

    def _average(self, model: nn.Module, fragments: Sequence[Fragment]) -> bool:
        """Average fragments and wait for it, after those on their way. False: no update since the last time."""
        rounds, workers = self._rounds, self._workers(model, "sync")
        tensors = self._run_on_all(workers, lambda: self._local_tensors(model))
        facts = repr([self._phase, *(fragment.since for fragment in rounds.fragments)])
        self._run_on_all(None, lambda: workers.agree(facts, 0, UPDATES))
        flying = [fragment for fragment in fragments if fragment.flight is not None]
        rounds.land(flying, tensors)
        fragments = [fragment for fragment in fragments if fragment.since]
        rounds.average(fragments, tensors)
        return bool(flying or fragments)


def _local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local_part(x) for name, x in tensors.items()}
