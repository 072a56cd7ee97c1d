"""`TimedModel`: a model that is trained with one method, a step at a time, to be timed beside others."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compression import DDPHook, compress
from ...compression.settings import HierarchyLike
from ...measure import Breakdown
from ...measure.breakdown import pause
from ...measure.cost_model import built_buckets
from ..method_name import TrainingMethod
from ..train.optimizers import SAM


class TimedModel:
    """A model that is trained with one method, a step at a time. Create it on all workers.

    Args:
        model: the model, without wrappers.
        transform: changes the model (in DDP, if there are several workers) and the optimizer to what a run has at its
            end: a low-rank or a pruned model.
        clip: maximum norm of the gradients.
        hierarchy: of the compression, as in `compress`.
    """

    def __init__(
        self,
        method: TrainingMethod,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Any],
        loss: Callable[[nn.Module], Tensor],
        transform: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
        clip: float | None = None,
        hierarchy: HierarchyLike = "flat",
    ) -> None:
        self.method, self.inner, self.loss, self.clip = method, model, loss, clip
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = next(model.parameters()).device
        self.ddp = DistributedDataParallel(model) if self.size > 1 and method.local is None else None
        self.model = self.ddp or model
        self.optimizer = optimizer(model)
        self.hook: DDPHook | None = None
        if self.ddp is not None and method.compress is not None:
            hook = compress(
                self.ddp, method.compress, optimizer=self.optimizer, hierarchy=hierarchy, scope=method.scope
            )
            assert isinstance(hook, DDPHook)
            self.hook = hook
        if transform is not None:
            transform(self.model, self.optimizer)
        self.local = None if method.local is None else method.local.build()
        if self.local is not None:
            self.local.start(model)

    @property
    def period(self) -> int:
        """Number of steps after which all of them recur: 1, or a round of local steps."""
        return 1 if self.method.local is None else self.method.local.h

    def step(self, exchange: bool = True) -> None:
        """Make one update; without `exchange`, from the gradients of this worker only."""
        with self._gradient_sync(exchange):
            self.optimizer.zero_grad()
            if isinstance(self.optimizer, SAM):
                with contextlib.nullcontext() if self.ddp is None else self.ddp.no_sync():
                    self._backward()
                with self.optimizer.perturbed(self.inner):
                    self._backward()
            else:
                self._backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.inner.parameters(), self.clip)
        self.optimizer.step()
        if exchange and self.local is not None:
            self.local.step(self.inner)

    def _backward(self) -> None:
        self.loss(self.model).backward()

    def time_parts(self, steps: int, exchange: bool = True) -> dict[str, float]:
        """Mean seconds of a step, as "step", and of its parts (see `Breakdown`)."""
        breakdown = Breakdown(self.model, self.optimizer)
        seconds = self.seconds(steps, exchange, breakdown)
        parts, waited = breakdown.parts, self._waited / steps  # which the breakdown counts as data
        return parts | {
            "data": parts["data"] - waited, "exchange": parts["exchange"] + waited, "step": seconds
        }  # fmt: skip

    def seconds(
        self, steps: int = 1, exchange: bool = True, breakdown: AbstractContextManager[object] | None = None
    ) -> float:
        """Mean seconds of a step. All workers start and end at the same time; `breakdown` is active meanwhile."""
        waited = self._wait()
        self._barrier()
        start = time.perf_counter()
        with breakdown or contextlib.nullcontext():
            for _ in range(steps):
                self.step(exchange)
            self._barrier()
            seconds = (time.perf_counter() - start) / steps
        self._waited = 0.0 if self.local is None else self.local.waited - waited
        self._wait()  # messages on their way must not meet those of other models
        return seconds

    def _wait(self) -> float:
        """Wait for averages of local steps on their way; return the seconds of waiting for averages so far."""
        if self.local is None:
            return 0.0
        self.local.wait()
        return self.local.waited

    def compute_seconds(self) -> float:
        """Seconds of one step of this worker without the exchange; all workers start at the same time."""
        self._barrier()
        pause()
        start = time.perf_counter()
        self.step(exchange=False)
        self._synchronize()
        return time.perf_counter() - start

    def traffic(self) -> tuple[float, int]:
        """Bytes on the wire and messages of a step of this worker; plain DDP is counted as a ring all-reduce."""
        if self.local is not None:
            meter, fragments = self.local.meter, self.local.schedule.fragments
            a_round = fragments / max(meter.steps, 1)  # of the meter's steps, one for each fragment
            return meter.wire_bytes * a_round / self.period, round(meter.messages * a_round / self.period)
        if self.ddp is None:
            return 0.0, 0
        if self.hook is not None:
            meter = self.hook.meter
            return meter.wire_bytes / max(meter.steps, 1), round(meter.messages / max(meter.steps, 1))
        sizes = built_buckets(self.ddp)
        return 2 * (self.size - 1) / self.size * sum(sizes), len(sizes)

    @contextlib.contextmanager
    def _gradient_sync(self, exchange: bool) -> Iterator[None]:
        if self.ddp is None:
            yield
            return
        # DDP decides at the end of a pass whether the next one broadcasts buffers; here steps are independent.
        self.ddp.require_forward_param_sync = exchange
        with contextlib.nullcontext() if exchange else self.ddp.no_sync():
            yield

    def _barrier(self) -> None:
        self._synchronize()
        if self.size > 1:
            dist.barrier()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
