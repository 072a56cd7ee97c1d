"""`Breakdown`: where a training step's time goes, seen from outside the user's loop."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ..compression.ddp_hook import Hook
from ..distributed.bucket_hook import AtLastBucket
from ..distributed.rewrap import find_ddp
from ..optim.carry import Optimizers, as_list
from .clock import Moment, now, passed
from .clock import between as seconds_between

#: They add up to the step.
PARTS = ("data", "forward", "backward", "encode", "exchange", "decode", "optimizer")
#: DDP times its exchange on every so many steps. On a GPU that waits for the step before, hence not always.
_SAMPLE = {"cpu": 1, "cuda": 5}
_TORCH_SAMPLE = 100  # torch's own; there is no way to ask


class Breakdown:
    """Times the steps of a loop while it is entered; a step ends with `optimizer.step()`.

    | part | from … to |
    |---|---|
    | data | the end of a step … the next forward: loading, logging, validation; what is done between two passes of a step |
    | forward | … with the loss, and with DDP's broadcast of buffers |
    | backward | without waiting for the exchange, and without what compression computes |
    | encode, decode | what compression computes (see `Meter`) |
    | exchange | while somebody waits for it |
    | optimizer | … with clipping and the like before it |
    | hidden | not a part: the exchange while backward was running, from its first message on |

    On a GPU times are those of its stream, and nothing waits for it until `read`. The exchange of `exact_` and of FSDP2
    is inside of backward and forward, and cannot be told from them.

    Args:
        model: the one the loop calls, wrapped or not.
        optimizer: whose steps count; by default those of all that hold parameters of the model.

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
        self.meter = state.meter if isinstance(state, Hook) else None
        # Under our hooks DDP takes their work for backward: it cannot say what was hidden.
        self._sampled = self.ddp is not None and not isinstance(state, AtLastBucket)
        self._handles: list[Any] = []
        self.parts: dict[str, float] = {}
        self.steps = 0  # that `parts` are of

    def __enter__(self) -> Breakdown:
        self._marks: list[tuple[str, Moment]] = []
        self._mark("done")
        self._stepped = self._in_backward = False
        self._waiting: list[list[tuple[str, Moment]]] = []  # of whole steps, not yet read
        self._begin()
        self._handles = [
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        if self.ddp is not None and self._sampled:
            self._sample: Any = 0  # the iteration that DDP's times are of
            self._due = False  # whether those of a pass in this block are still to come
            self.ddp._set_ddp_runtime_logging_sample_rate(_SAMPLE.get(self.device.type, 1))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._detach()
        if kind is None:
            self.read()

    def read(self) -> dict[str, float]:
        """Mean seconds a step of all parts, `hidden` and the whole `step`, since the last read. Waits for the device."""
        self._look_at_ddp(at_once=True)
        self._close()
        while self._waiting:
            self._fold()
        sums, n = self._sums, max(self._count, 1)
        coded = {name: x - self._metered[name] for name, x in self._meter_seconds().items()}
        hidden = coded.pop("hidden", 0.0) / n
        for name, seconds in coded.items():
            sums[name] += seconds
        sums["backward"] -= sum(coded.values())  # the hook runs inside of it
        if self._samples:
            hidden = sum(self._samples) / len(self._samples)
        means = {name: seconds / n for name, seconds in sums.items()}
        self.parts, self.steps = {**means, "hidden": hidden, "step": sum(means.values())}, self._count
        self._begin()
        return dict(self.parts)

    def __str__(self) -> str:
        return "\n".join(f"{name:<9} {1e3 * seconds:10.2f} ms" for name, seconds in self.parts.items())

    def _begin(self) -> None:
        self._sums, self._count = dict.fromkeys(PARTS, 0.0), 0
        self._samples: list[float] = []
        self._metered = self._meter_seconds()

    def _meter_seconds(self) -> dict[str, float]:
        return self.meter.seconds if self.meter is not None else {}

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.ddp is not None and self._sampled and self._handles:
            self.ddp._set_ddp_runtime_logging_sample_rate(_TORCH_SAMPLE)
        self._handles = []

    def _mark(self, what: str) -> None:
        self._marks.append((what, now(self.device)))

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._in_backward = False  # of a pass that broke off
            self._close()
            self._mark("forward")

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        for x in _tensors(output):
            if x.requires_grad:
                x.register_hook(self._backward_begins)
        self._look_at_ddp()

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._handles and not self._in_backward:
            self._in_backward = True
            self._mark("backward")
            _at_end_of_backward(self._computed)

    def _computed(self) -> None:
        """All gradients are there. DDP waits for its exchange in a callback of its own, between this and the next."""
        self._mark("backward" if self.ddp is None else "exchange")
        _at_end_of_backward(self._exchanged)

    def _exchanged(self) -> None:
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
            held = {id(p) for p in self.model.parameters()}
            self._owns[optimizer] = any(id(p) in held for g in optimizer.param_groups for p in g["params"])
        return self._owns[optimizer]

    def _close(self) -> None:
        """A step is over; the next begins where it ended."""
        if self._stepped:
            self._waiting.append(self._marks)
            self._marks, self._stepped = [self._marks[-1]], False
            if len(self._waiting) > 100 and passed(self._waiting[0][-1][1]):
                self._fold()

    def _fold(self) -> None:
        """Add the oldest step up."""
        for (what, start), (then, end) in pairwise(self._waiting.pop(0)):
            if what in ("done", "between"):
                what = "data" if then == "forward" else "optimizer"
            self._sums[what] += seconds_between(start, end)
        self._count += 1

    def _look_at_ddp(self, at_once: bool = False) -> None:
        """DDP works the times of a synchronised pass out when the next one begins."""
        if self.ddp is None or not self._sampled or (at_once and not self._due):
            return
        if at_once and self.ddp.logger is not None:
            self.ddp.logger.set_runtime_stats_and_log()
        data = self.ddp._get_ddp_logging_data()
        if self._due and data.get("iteration", 0) != self._sample:
            self._samples.append(int(data.get("backward_compute_comm_overlap_time", 0)) / 1e9)
            self._due = False
        self._sample = data.get("iteration", 0)
        if not at_once and torch.is_grad_enabled() and self.ddp.require_backward_grad_sync:
            self._due = True


def _at_end_of_backward(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _tensors(output: Any) -> Iterator[Tensor]:
    for x in pytree.tree_leaves(output):
        if isinstance(x, Tensor):
            yield x
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            yield from _tensors([getattr(x, f.name) for f in dataclasses.fields(x)])
