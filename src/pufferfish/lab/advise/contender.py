"""`Contender`: a model that is trained in one way, a step at a time, to be timed beside others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compression import Hook, compress
from ...compression.aggregator import Levels
from ...measure import Breakdown
from ...measure.clock import wait
from ..rivals import SAM
from ..train.choice import Choice


class Contender:
    """A model that is trained by a method, a step at a time. Make it on all ranks.

    Args:
        chosen: what compresses its gradients.
        model: as it is built.
        optimizer: made for the model.
        loss: of a batch.
        become: makes of the model, in DDP, and the optimizer what a run has made of them at its end: low rank, or a ticket.
        clip: largest norm of the gradients.
        levels: of compression, as in `compress`.
    """

    def __init__(
        self,
        chosen: Choice,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        loss: Callable[[nn.Module], Tensor],
        become: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
        clip: float | None = None,
        levels: Levels = "flat",
    ) -> None:
        self.chosen, self.bare, self.loss, self.clip = chosen, model, loss, clip
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = next(model.parameters()).device
        self.ddp = DistributedDataParallel(model) if self.size > 1 else None
        self.model = self.ddp or model  # as a loop calls it
        self.optimizer = optimizer(model)
        if isinstance(self.optimizer, SAM):
            self.optimizer.model = self.model  # whose first pass is not sent
        self.hook: Hook | None = None
        if self.ddp is not None and chosen.compress is not None:
            made = compress(self.ddp, chosen.compress, optimizer=self.optimizer, levels=levels)
            assert isinstance(made, Hook)
            self.hook = made
        if become is not None:
            become(self.model, self.optimizer)

    def step(self, exchange: bool = True) -> None:
        """One update; without the exchange, what this worker computes alone."""
        with self._synchronised(exchange):
            self.optimizer.zero_grad()
            if isinstance(self.optimizer, SAM):
                with self.optimizer.alone():
                    self._backward()
                with self.optimizer.perturbed():
                    self._backward()
            else:
                self._backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.bare.parameters(), self.clip)
        self.optimizer.step()

    def _backward(self) -> None:
        self.loss(self.model).backward()

    def turn(self, steps: int, exchange: bool = True) -> dict[str, float]:
        """Mean seconds of so many steps, and of their parts (see `Breakdown`)."""
        watched = Breakdown(self.model, self.optimizer)
        seconds = self.seconds(steps, exchange, watched)
        return watched.parts | {"step": seconds}

    def seconds(
        self, steps: int = 1, exchange: bool = True, watched: AbstractContextManager[object] | None = None
    ) -> float:
        """Mean of so many steps; all ranks begin and end together, and what watches the steps begins with them."""
        self._together()
        begun = time.perf_counter()
        with watched or contextlib.nullcontext():
            for _ in range(steps):
                self.step(exchange)
            self._together()
            return (time.perf_counter() - begun) / steps

    def own_seconds(self) -> float:
        """Seconds of one step of this rank without the exchange; all ranks begin together."""
        self._together()
        wait()
        begun = time.perf_counter()
        self.step(exchange=False)
        self._settled()
        return time.perf_counter() - begun

    def sent(self) -> tuple[float, int]:
        """Bytes on the wire and messages of a step, of this rank. What plain DDP sends is what a ring makes of it."""
        if self.ddp is None:
            return 0.0, 0
        if self.hook is not None:
            meter = self.hook.meter
            return meter.wire_bytes / max(meter.steps, 1), round(meter.messages / max(meter.steps, 1))
        sizes = self.buckets()
        return 2 * (self.size - 1) / self.size * sum(sizes), len(sizes)

    def buckets(self) -> list[int]:
        """Bytes of plain DDP's messages, in their order; as they are after the first step."""
        assert self.ddp is not None
        told = self.ddp._get_ddp_logging_data()
        return [int(n) for n in str(told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes")).split(",")]

    @contextlib.contextmanager
    def _synchronised(self, exchange: bool) -> Iterator[None]:
        if self.ddp is None:
            yield
            return
        # DDP decides at the end of a pass whether the next one begins with buffers: here each is its own.
        self.ddp.require_forward_param_sync = exchange
        with contextlib.nullcontext() if exchange else self.ddp.no_sync():
            yield

    def _together(self) -> None:
        self._settled()
        if self.size > 1:
            dist.barrier()

    def _settled(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
