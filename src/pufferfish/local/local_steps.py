"""`LocalSteps`: each worker makes h updates on its own, then all average their models (local SGD, DiLoCo)."""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..compression import Group, Meter, Methods, NoCompression, Settings, Transport
from ..distributed.ddp import reshard
from ..distributed.workers import Workers
from ..layers import local_part, own_name, unwrap
from ..layers.names import trainable_parameters
from .fragments import (
    Anchor,
    Flight,
    Fragment,
    Means,
    Outer,
    Schedule,
    move_engine_states,
    separate_group,
    split_by_depth,
)

T = TypeVar("T")

#: What the workers compare before an average.
_UPDATES = "the number of updates since the last average"


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
    repaired; `pf.distributed.FiniteGuard` skips the updates that cause this.

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

    Attributes:
        lost: number of averages discarded because they were not finite.
        waited: seconds that this worker has waited for averages instead of training.
        applied_bytes: bytes on the wire of the averages applied so far: unlike those of `meter`, independent of what is on
            its way, and the same on all workers at the same update.

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
        self._group, self._transport = self._connect(group, delay)
        self._transport.operation = "LocalSteps.sync"
        self.lost = 0
        self.waited = 0.0
        self.applied_bytes = 0.0
        self._phase = 0  # number of updates since `start` or `sync`, modulo h
        self._anchor: Anchor | None = None
        self._fragments: list[Fragment] = []
        self._inside: list[Workers] = []  # workers that train this replica together
        self._last: Flight | None = None
        self._stream_of_flights: torch.cuda.Stream | None = None
        self._resumed: dict[str, Any] | None = None  # loaded state, until the next `start`

    @property
    def outer(self) -> optim.Optimizer | None:
        """The outer optimizer; None before `start`."""
        return None if self._anchor is None else self._anchor.outer

    @property
    def meter(self) -> Meter:
        """Bytes sent by the averages so far, one step for each fragment. The broadcast in `start` is not counted."""
        return self._transport.meter

    @property
    def updates(self) -> int:
        """Number of updates since the last average; with fragments, the largest of their numbers."""
        return max((fragment.since for fragment in self._fragments), default=0)

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Set the anchor. Call it on all workers before the first update, and again after parameters are replaced.

        All workers get the parameters and buffers of worker 0, unless state was loaded with `load_state_dict`. The
        state of the outer optimizer and of the compression method for replaced parameters is dropped.
        """
        resumed, workers, inner = self._resumed, self._workers(model, "start"), unwrap(model)
        workers.run_on_all(lambda: check_model(model, self._group))
        self._inside = [Workers(g, workers.device, "LocalSteps.start") for g in _inside_groups(model)]
        anchor = self._run_on_all(workers, lambda: self._prepare(model, resumed))
        tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        parts = _local_parts(tensors)
        layout = [
            (own_name(name), parts[name].shape, x.dtype, x.requires_grad) for name, x in tensors.items()
        ]
        facts = (self.schedule, self.method, self._phase, resumed is None, layout)
        about = "h, the other arguments, the model (names, shapes, dtypes) or loaded state"
        self._run_on_all(None, lambda: workers.agree(repr(facts), 0, about))
        if resumed is None:
            for x in parts.values():
                x.copy_(workers.broadcast_tensor(x.to(workers.device).contiguous(), 0))
            anchor.fill(_local_parts(trainable_parameters(model)), averaged_buffers(model), workers.device)
        else:
            anchor.fill(resumed["anchor"], resumed["buffers"], workers.device)
            anchor.load_outer_state(resumed["outer"])
        self._anchor = anchor
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
        due = [self._fragments[p] for p in self.schedule.due(phase)] if self._fragments else []
        if self.schedule.delay or not due:
            tensors = self._local_tensors(model)  # raises at once if parameters were replaced
        self._phase = phase
        landing = self._count_update()
        if not self.schedule.delay:
            return bool(due) and self._average(model, due)
        for fragment in due:
            self._start_flight(fragment, tensors, repr((phase, fragment.since)))
        self._apply_flights(landing, tensors)
        return bool(landing)

    @torch.no_grad()
    def sync(self, model: nn.Module) -> bool:
        """Average now, on all workers. Returns False if there was no update since the last average.

        Averages on their way are applied first. Then all workers have the same model, and the schedule starts again.
        """
        if self._resumed is not None:
            self.start(model)
        averaged = self._average(model, self._fragments)
        self._phase = 0
        return averaged

    def wait(self) -> None:
        """Wait for averages on their way. They are applied when they are due."""
        begin = time.perf_counter()
        if self._last is not None:
            self._last.wait()
        self.waited += time.perf_counter() - begin

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
            "fragments": [fragment.state_dict() for fragment in self._fragments],
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
        self._phase, self.lost = state["phase"] % self.schedule.h, state["lost"]
        self._resumed = copy.deepcopy(dict(state)) if state["anchor"] else None

    def _connect(
        self, group: dist.ProcessGroup | None, delay: int
    ) -> tuple[dist.ProcessGroup | None, Transport]:
        """Return the group of workers that call the methods together, and the transport of their averages."""
        transport = Group(group)
        if delay:
            transport = Group(separate_group(transport.group))
        return transport.group, transport

    def _workers(self, model: nn.Module, method: str) -> Workers:
        self.wait()  # flights use the group from another thread
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        return Workers(self._group, device, f"LocalSteps.{method}")

    def _run_on_all(self, workers: Workers | None, work: Callable[[], T]) -> T:
        """Run `work`; an error on one worker is raised on all of `workers` and of its replica."""
        for some in [workers, *self._inside] if workers else self._inside:
            work = partial(some.run_on_all, work)
        return work()

    def _prepare(self, model: nn.Module, resumed: Mapping[str, Any] | None) -> Anchor:
        """Check what does not fit the model, and return an anchor for it, still without values. Changes nothing."""
        params = _local_parts(trainable_parameters(model))
        self._settings.check_patterns(params)
        if resumed is not None:
            _check_shapes(params, resumed["anchor"], "was saved", "build the model as it was saved")
        elif self.updates or any(fragment.flight for fragment in self._fragments):
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
        saved = resumed["fragments"] if resumed else [f.state_dict() for f in self._fragments]
        split = [f["names"] for f in saved] if resumed else self._split(model)
        self._fragments = [Fragment(n, self._settings, anchor.buffers, self._transport) for n in split]
        shapes = {name: x.shape for name, x in anchor.tensors().items()}
        for fragment, state in zip(self._fragments, saved, strict=False):
            if not resumed:
                mine = {name: shapes[name] for name in fragment.names}
                state = state | {"engine": move_engine_states([f["engine"] for f in saved], mine)}
            fragment.load_state_dict(state)

    def _local_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of this model to average; ValueError if they differ in shape from the anchor."""
        if self._anchor is None:
            raise ValueError("LocalSteps: call local.start(model) on all workers, before the first update")
        reshard(model)
        buffers = {own_name(name): b for name, b in unwrap(model).named_buffers()}
        buffers = {name: b for name, b in buffers.items() if name in self._anchor.buffers}
        tensors = _local_parts({**trainable_parameters(model), **buffers})
        remedy = "call local.sync(model) before parameters are replaced, and local.start(model) after"
        _check_shapes(tensors, self._anchor.tensors(), "was started", remedy)
        return tensors

    def _count_update(self) -> list[Fragment]:
        """Count one update of this model, and return the fragments whose averages are now to be applied."""
        landing = []
        for fragment in self._fragments:
            fragment.since += 1
            if fragment.flight is not None:
                fragment.flight.remaining -= 1
                landing += [fragment] if fragment.flight.remaining == 0 else []
        return landing

    def _average(self, model: nn.Module, fragments: Sequence[Fragment]) -> bool:
        """Average fragments and wait for it, after those on their way. False: no update since the last time."""
        workers = self._workers(model, "sync")
        tensors = self._run_on_all(workers, lambda: self._local_tensors(model))
        facts = repr([self._phase, *(fragment.since for fragment in self._fragments)])
        self._run_on_all(None, lambda: workers.agree(facts, 0, _UPDATES))
        flying = [fragment for fragment in fragments if fragment.flight is not None]
        self._apply_flights(flying, tensors)
        assert self._anchor is not None
        begin, means = time.perf_counter(), []
        fragments = [fragment for fragment in fragments if fragment.since]
        for fragment in fragments:
            differences = self._anchor.differences(fragment.names, tensors)
            means.append(self._mean(fragment, differences))
            fragment.since = 0
        self.waited += time.perf_counter() - begin
        self._apply(fragments, means, tensors)
        return bool(flying or fragments)

    def _start_flight(self, fragment: Fragment, tensors: Mapping[str, Tensor], facts: str) -> None:
        """Start the average of a fragment of this model. `facts` must be equal on all workers."""
        assert self._anchor is not None
        differences = self._anchor.differences(fragment.names, tensors)
        device = next(iter(differences.values())).device
        workers = Workers(self._group, device, "LocalSteps.step")

        def average() -> Means:
            workers.agree(facts, 0, _UPDATES)
            return self._mean(fragment, differences)

        fragment.since = 0
        self._last = Flight.send(average, self.schedule.delay, after=self._last, stream=self._stream(device))
        fragment.flight = self._last

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream of flights on a GPU; None on a CPU."""
        if device.type == "cuda" and self._stream_of_flights is None:
            self._stream_of_flights = torch.cuda.Stream(device)
        return self._stream_of_flights

    def _mean(self, fragment: Fragment, differences: Means) -> Means:
        """Average a fragment and count its bytes; averages run one after the other."""
        before = self.meter.wire_bytes
        means = fragment.engine.average(differences)
        fragment.sent_bytes = self.meter.wire_bytes - before
        return means

    def _apply_flights(self, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor]) -> None:
        """Apply averages that were on their way."""
        begin, means = time.perf_counter(), []
        for fragment in fragments:
            assert fragment.flight is not None
            means.append(fragment.flight.wait())
            self._last = None if self._last is fragment.flight else self._last
            fragment.flight = None
        self.waited += time.perf_counter() - begin
        self._apply(fragments, means, tensors)

    def _apply(
        self, fragments: Sequence[Fragment], means: Sequence[Means], tensors: Mapping[str, Tensor]
    ) -> None:
        """Update the anchor by the averages of some fragments, and this model by the anchor."""
        assert self._anchor is not None
        self.applied_bytes += sum(fragment.sent_bytes for fragment in fragments)
        finite = self._all_finite(means)
        for fragment, mean, ok in zip(fragments, means, finite, strict=True):
            if ok:
                self._anchor.step(mean)
                # Without an update since it was sent, a worker has nothing of its own to keep.
                mixing = self.schedule.mixing if fragment.since else 0.0
                self._anchor.copy_to(fragment.names, tensors, mixing)
        if all(finite):
            return
        self.lost += 1
        source = "another worker" if all_finite(tensors.values()) else "this worker"
        warnings.warn(
            f"LocalSteps, average {self.meter.steps}: the model of {source} is not finite; all workers return to the last "
            "averaged model",
            RuntimeWarning,
            stacklevel=5,
        )
        # All fragments: a model with one that is not finite has no finite gradient.
        flying = {f: f.flight.wait() for f in self._fragments if f.flight is not None}
        for fragment, ok in zip(flying, self._all_finite(list(flying.values())), strict=True):
            fragment.flight = fragment.flight if ok else None
        for fragment in self._fragments:
            fragment.since = 0
        self._anchor.copy_to(tensors, tensors)

    def _all_finite(self, means: Sequence[Means]) -> list[bool]:
        """Whether each mean is finite, on all workers of the replica: each may hold another shard."""
        bad = torch.tensor([not all_finite(mean.values()) for mean in means], dtype=torch.float32)
        for workers in self._inside if means else ():
            bad = workers.max(bad)
        return [not flag for flag in bad.tolist()]


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
    reshard(model)  # a forward pass without a backward pass leaves whole parameters
    params = trainable_parameters(model)
    if not params:
        raise ValueError("LocalSteps: no parameter of the model requires a gradient")
    device = next(iter(params.values())).device
    sharded = any(isinstance(p, DTensor) for p in params.values())
    for name, p in params.items():
        if isinstance(p, DTensor):
            _check_shard(name, p, group)
        elif sharded:
            raise TypeError(
                f"LocalSteps: {name} is not sharded, but other parameters are; apply fully_shard to the whole model"
            )
        if not p.is_floating_point() or p.device != device:
            raise TypeError(
                f"LocalSteps: {name} is {p.dtype} on {p.device}; all parameters must be floating-point on {device}"
            )


def _check_shard(name: str, p: DTensor, group: dist.ProcessGroup | None) -> None:
    groups = [p.device_mesh.get_group(i) for i in range(p.device_mesh.ndim)]
    if any(_overlap(inside, group) for inside in groups) or any(x.is_partial() for x in p.placements):
        raise TypeError(
            f"LocalSteps: {name} is a DTensor {p.placements} over workers that would average it; pass the "
            "workers that hold the same shard in all replicas as group"
        )


def _overlap(inside: dist.ProcessGroup, group: dist.ProcessGroup | None) -> bool:
    """Whether two groups have more workers in common than this one."""
    if group is None:
        return False
    ranks = dist.get_process_group_ranks
    return len({*ranks(inside)} & {*ranks(group)}) > 1


def _inside_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups of workers that train this replica together, by DDP or FSDP2."""
    groups = [m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)]
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)][:1]
    groups += [mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim)]
    return [group for group in groups if dist.get_world_size(group) > 1]


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that can be averaged: no counters, no caches, no masks with infinities."""
    inner = unwrap(model)
    saved = inner.state_dict().keys()
    floats = {name: b for name, b in inner.named_buffers() if b.is_floating_point() and name in saved}
    return {own_name(name): b for name, b in floats.items() if bool(b.isfinite().all())}


def _local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what this worker holds of the tensors: its shards, or all of them."""
    return {name: local_part(x) for name, x in tensors.items()}


def _check_shapes(
    tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], when: str, remedy: str
) -> None:
    """Raise if tensors differ from those `before` in name or shape; `when` and `remedy` complete the message."""
    for name in [*tensors, *before]:
        a, b = tensors.get(name), before.get(name)
        if a is None or b is None or a.shape != b.shape:
            raise ValueError(
                f"LocalSteps: {name} is {_shape(a)}, but was {_shape(b)} when the model {when}; {remedy}"
            )


def _shape(x: Tensor | None) -> str:
    return "missing" if x is None else "×".join(map(str, x.shape)) or "a scalar"


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of the tensors are finite; synchronizes with their device once.

    >>> all_finite([torch.ones(2), torch.tensor(float("nan"))])
    False
    """
    return bool(torch.stack([x.detach().isfinite().all() for x in tensors]).all())
