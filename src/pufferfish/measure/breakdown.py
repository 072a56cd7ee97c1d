"""`Breakdown`: times the parts of a training step through hooks, without changes to the training loop."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ..compression.ddp_hook import DDPHook
from ..distributed.ddp import AtLastBucket, find_ddp
from ..optim.carry import Optimizers, as_list
from .clock import Timestamp, elapsed, reached, timestamp

#: Parts of a step; their times add up to the step's time.
PARTS = ("data", "forward", "backward", "encode", "exchange", "decode", "optimizer")
#: DDP measures its communication every n steps. On a GPU that waits for the previous step, so not on every step.
_SAMPLE_EVERY = {"cpu": 1, "cuda": 5}
_TORCH_SAMPLE_EVERY = 100  # torch's default; it cannot be read back
_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback


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
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.optimizers = as_list(optimizer)
        self._owns: weakref.WeakKeyDictionary[optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        state = self.ddp._comm_hooks[0][1] if self.ddp is not None and self.ddp._comm_hooks else None
        self.hook = state if isinstance(state, DDPHook) else None
        self._meter = self.hook.meter if self.hook is not None and self.device.type == "cpu" else None
        # With our hooks DDP counts their work as backward, so its own measurement of the overlap is wrong.
        self._samples_ddp = self.ddp is not None and not isinstance(state, AtLastBucket)
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
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        if self.hook is not None and self._meter is None:
            vars(self.hook)["average"] = self._marked(self.hook.average)
        if self.ddp is not None and self._samples_ddp:
            self._sampled_iteration: Any = 0  # the iteration of DDP's latest measurement
            self._sample_due = False  # whether the measurement of a pass in this block is still to come
            self.ddp._set_ddp_runtime_logging_sample_rate(_SAMPLE_EVERY.get(self.device.type, 1))
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
        if self.ddp is not None and self._samples_ddp and self._handles:
            self.ddp._set_ddp_runtime_logging_sample_rate(_TORCH_SAMPLE_EVERY)
        self._handles = []

    def _mark(self, event: str) -> None:
        self._marks.append((event, timestamp(self.device)))

    def _marked(self, average: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """A hook's `average` that begins the exchange."""

        def marked(buckets: list[Any]) -> None:
            self._mark("exchange")
            average(buckets)

        return marked

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._in_backward = False  # set if the previous backward raised an error
            self._end_step()
            self._mark("forward")

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        for x in output_tensors(output):
            if x.requires_grad:
                x.register_hook(self._on_backward_start)
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
        if self.ddp is None or not self._samples_ddp or (now and not self._sample_due):
            return
        if now and self.ddp.logger is not None:
            self.ddp.logger.set_runtime_stats_and_log()
        data = self.ddp._get_ddp_logging_data()
        if self._sample_due and data.get("iteration", 0) != self._sampled_iteration:
            self._overlaps.append(int(data.get("backward_compute_comm_overlap_time", 0)) / 1e9)
            self._sample_due = False
        self._sampled_iteration = data.get("iteration", 0)
        if not now and torch.is_grad_enabled() and self.ddp.require_backward_grad_sync:
            self._sample_due = True


def output_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in the output of a model: in containers and dataclasses, too."""
    for x in pytree.tree_leaves(output):
        if isinstance(x, Tensor):
            yield x
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            yield from output_tensors([getattr(x, f.name) for f in dataclasses.fields(x)])
