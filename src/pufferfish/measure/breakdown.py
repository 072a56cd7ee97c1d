"""`Breakdown` times the parts of a training step, `GradientTimeline` its gradients, through hooks: the loop stays as it is."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ..compression.ddp_hook import DDPHook
from ..distributed.ddp import AtLastBucket, find_ddp
from ..lowrank.optimizers import Optimizers, as_list

#: Parts of a step; their times add up to the step's time.
PARTS = ("data", "forward", "backward", "encode", "exchange", "decode", "optimizer")
#: DDP measures its communication every n steps. On a GPU that waits for the previous step, so not on every step.
_SAMPLE_EVERY = {"cpu": 1, "cuda": 5}
_TORCH_SAMPLE_EVERY = 100  # torch's default; it cannot be read back
_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
_POINTS = 32  # of a timeline's curve; more do not change predictions

#: Seconds, or an event on a GPU's stream.
Timestamp = float | torch.cuda.Event


class Breakdown:
    """Times the training steps that run in its `with` block; a step ends with `optimizer.step()`.

    - data: end of a step to the next forward, and between the passes of one step: data loading, logging, validation
    - forward: forward pass and loss, including DDP's broadcast of buffers
    - backward: backward pass, without waiting for the exchange and without compression's computation
    - encode, decode: compression's computation (see `Meter`)
    - exchange: communication that the step waits for
      (on a GPU: together with the compression's computation)
    - optimizer: end of backward to the end of `optimizer.step()`, including gradient clipping
    - hidden: communication that overlaps with backward, from its first message on; not part of the step

    On a GPU the times are those of its stream, and nothing synchronizes before `read`. The communication of `exact_` and
    of FSDP2 happens inside backward and forward and is counted there.

    Args:
        model: the model that the loop calls, wrapped or not.
        optimizer: the optimizers whose steps count (default: all that hold parameters of the model).

    >>> model = nn.Linear(4, 4)
    >>> optimizer = optim.SGD(model.parameters(), lr=0.1)
    >>> with Breakdown(model) as times:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).sum().backward()
    ...         optimizer.step()
    >>> times.steps, list(times.parts)
    (3, ['data', 'forward', 'backward', 'encode', 'exchange', 'decode', 'optimizer', 'hidden', 'step'])
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers = None) -> None:
        self.model, self.ddp = model, find_ddp(model)
        self.device = _device_of(model)
        self.optimizers = as_list(optimizer)
        self._owns: weakref.WeakKeyDictionary[optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        state = self.ddp._comm_hooks[0][1] if self.ddp is not None and self.ddp._comm_hooks else None
        self.hook = state if isinstance(state, DDPHook) else None
        self._meter = self.hook.meter if self.hook is not None and self.device.type == "cpu" else None
        # Measures its overlap by itself. With our hooks DDP counts their work as backward, so that would be wrong.
        self._sampled = None if isinstance(state, AtLastBucket) else self.ddp
        self._handles: list[Any] = []
        self.parts: dict[str, float] = {}
        self.steps = 0  # number of steps that `parts` averages over

    def __enter__(self) -> Breakdown:
        self._marks: list[tuple[str, Timestamp]] = []
        self._mark("done")
        self._stepped = self._in_backward = False
        self._pending: list[list[tuple[str, Timestamp]]] = []  # marks of complete steps, not yet summed
        self._reset()
        self._handles = [
            # before FSDP2's own, which gathers parameters
            self.model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        if self.hook is not None and self._meter is None:
            average = self.hook.average

            def marked(buckets: list[Any]) -> None:
                self._mark("exchange")
                average(buckets)

            vars(self.hook)["average"] = marked
        if self._sampled is not None:
            self._sampled_iteration: Any = 0  # the iteration of DDP's latest measurement
            self._sample_due = False  # whether the measurement of a pass in this block is still to come
            self._sampled._set_ddp_runtime_logging_sample_rate(_SAMPLE_EVERY.get(self.device.type, 1))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._detach()
        if kind is None:
            self.read()

    def read(self) -> dict[str, float]:
        """Mean seconds per step of every part, of `hidden` and of the whole `step` since the last `read`. Waits for the device."""
        self._sample_ddp(now=True)
        self._end_step()
        while self._pending:
            self._sum_oldest()
        sums, n = self._sums, max(self._count, 1)
        coding = {name: x - self._metered[name] for name, x in self._meter_seconds().items()}
        hidden = coding.pop("hidden", 0.0) / n
        for name, seconds in coding.items():
            sums[name] += seconds
        sums["backward"] -= sum(coding.values())  # the hook runs inside backward; empty on a GPU
        if self._overlaps:
            hidden = sum(self._overlaps) / len(self._overlaps)
        means = {name: seconds / n for name, seconds in sums.items()}
        self.parts, self.steps = {**means, "hidden": hidden, "step": sum(means.values())}, self._count
        self._reset()
        return dict(self.parts)

    def __str__(self) -> str:
        return "\n".join(f"{name:<9} {1e3 * seconds:10.2f} ms" for name, seconds in self.parts.items())

    def _reset(self) -> None:
        self._sums, self._count = dict.fromkeys(PARTS, 0.0), 0
        self._overlaps: list[float] = []
        self._metered = self._meter_seconds()

    def _meter_seconds(self) -> dict[str, float]:
        return self._meter.seconds if self._meter is not None else {}

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.hook is not None:
            vars(self.hook).pop("average", None)
        if self._sampled is not None and self._handles:
            self._sampled._set_ddp_runtime_logging_sample_rate(_TORCH_SAMPLE_EVERY)
        self._handles = []

    def _mark(self, event: str) -> None:
        self._marks.append((event, timestamp(self.device)))

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._in_backward = False  # set if the previous backward raised an error
            self._end_step()
            self._mark("forward")

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        _hook_gradients(output, self._on_backward_start)
        self._sample_ddp()

    def _on_backward_start(self, gradient: Tensor) -> None:
        if self._handles and not self._in_backward:
            self._in_backward = True
            self._mark("backward")
            _at_end_of_backward(self._on_backward_end)

    def _on_backward_end(self) -> None:
        """All gradients are computed. DDP waits for its communication in a callback between this one and the next."""
        self._mark("backward" if self.ddp is None else "exchange")
        _at_end_of_backward(self._on_exchange_end)

    def _on_exchange_end(self) -> None:
        self._in_backward = False
        self._mark("between")

    def _before_optimizer(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._counts(optimizer):
            self._mark("optimizer")

    def _after_optimizer(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._counts(optimizer):
            self._mark("done")
            self._stepped = True

    def _counts(self, optimizer: optim.Optimizer) -> bool:
        if self.optimizers:
            return any(optimizer is o for o in self.optimizers)
        if optimizer not in self._owns:
            own = {id(p) for p in self.model.parameters()}
            self._owns[optimizer] = any(id(p) in own for g in optimizer.param_groups for p in g["params"])
        return self._owns[optimizer]

    def _end_step(self) -> None:
        """Queue the marks of a finished step; the next step starts at its last mark."""
        if self._stepped:
            self._pending.append(self._marks)
            self._marks, self._stepped = [self._marks[-1]], False
            if len(self._pending) > 100 and reached(self._pending[0][-1][1]):
                self._sum_oldest()

    def _sum_oldest(self) -> None:
        """Add the times of the oldest queued step to the sums."""
        for (part, start), (following, end) in pairwise(self._pending.pop(0)):
            if part in ("done", "between"):
                part = "data" if following == "forward" else "optimizer"
            self._sums[part] += elapsed(start, end)
        self._count += 1

    def _sample_ddp(self, now: bool = False) -> None:
        """Collect DDP's measured overlap; DDP computes it for a synchronized pass when the next pass starts."""
        ddp = self._sampled
        if ddp is None or (now and not self._sample_due):
            return
        if now and ddp.logger is not None:
            ddp.logger.set_runtime_stats_and_log()
        data = ddp._get_ddp_logging_data()
        if self._sample_due and data.get("iteration", 0) != self._sampled_iteration:
            self._overlaps.append(int(data.get("backward_compute_comm_overlap_time", 0)) / 1e9)
            self._sample_due = False
        self._sampled_iteration = data.get("iteration", 0)
        if not now and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._sample_due = True


class GradientTimeline:
    """Records the second backward pass that runs in its `with` block; the first is slower than the others.

    A pass starts when the gradient of an output of `model` is computed, as in `Breakdown`.

    Args:
        model: the model that the loop calls, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = _device_of(model)
        self._handles: list[Any] = []
        self._started = False  # whether the backward pass of the latest forward pass has started
        # For each backward pass, its start and parameter id → (bytes, time its gradient was ready).
        self._passes: list[tuple[Timestamp, dict[int, tuple[int, Timestamp]]]] = []

    def __enter__(self) -> GradientTimeline:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._record) for p in trainable]
        self._handles.append(self.model.register_forward_hook(self._after_forward))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._started = False
        if len(self._passes) <= 2:  # hooks cannot be removed while they run
            _hook_gradients(output, self._on_backward_start)

    def _on_backward_start(self, gradient: Tensor) -> None:
        if self._handles and not self._started:
            self._started = True
            self._passes.append((timestamp(self.device), {}))

    def _record(self, p: Tensor) -> None:
        if self._started and len(self._passes) <= 2:
            self._passes[-1][1].setdefault(id(p), (p.nbytes, timestamp(p.device)))

    def curve(self) -> tuple[tuple[float, float], ...]:
        """Points (fraction of the gradient bytes, fraction of backward), for `Work.gradient_curve`. Waits for the device."""
        start, gradients = self._passes[:2][-1] if self._passes else (0.0, {})
        ready = list(gradients.values())
        total = sum(nbytes for nbytes, _ in ready)
        if len(ready) < 2 or not total:
            return (0.0, 0.0), (1.0, 1.0)
        seconds = [elapsed(start, stamp) for _, stamp in ready]
        points, done, next_point = [(0.0, 0.0)], 0, 1 / _POINTS
        for (nbytes, _), at in zip(ready, seconds, strict=True):
            done += nbytes
            if done / total >= next_point:
                points.append((done / total, at / seconds[-1] if seconds[-1] > 0 else 1.0))
                next_point = done / total + 1 / _POINTS
        return (*points[: -1 if points[-1][0] == 1 else None], (1.0, 1.0))


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _hook_gradients(output: Any, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradients of the tensors in a model's output: in containers and dataclasses, too."""
    for x in pytree.tree_leaves(output):
        if isinstance(x, Tensor):
            if x.requires_grad:
                x.register_hook(hook)
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            _hook_gradients([getattr(x, f.name) for f in dataclasses.fields(x)], hook)


def timestamp(device: torch.device) -> Timestamp:
    """Record the current time on `device`; on a GPU, an event on its current stream.

    >>> cpu = torch.device("cpu")
    >>> elapsed(timestamp(cpu), timestamp(cpu)) >= 0
    True
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def reached(stamp: Timestamp) -> bool:
    """Whether the device has reached `stamp`; does not wait."""
    return isinstance(stamp, float) or bool(stamp.query())


def elapsed(start: Timestamp, end: Timestamp) -> float:
    """Seconds from `start` to `end`; waits until the device has reached `end`."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def pause() -> None:
    """Sleep for 5 ms, as a worker waits for the others in a real step, so that caches are as cold as in training."""
    time.sleep(0.005)


def trimmed_mean(seconds: Iterable[float]) -> float:
    """Mean without the longest tenth (at least one), to exclude timings disturbed by other processes.

    Not the median: a short message takes 0.5 ms, or 4 ms if its process has lost its core, and both are common.

    >>> trimmed_mean([1.0, 1.0, 4.0, 100.0])
    2.0
    """
    ordered = sorted(seconds)
    kept = ordered[: len(ordered) - -(-len(ordered) // 10)] if len(ordered) > 2 else ordered
    return sum(kept) / len(kept)
