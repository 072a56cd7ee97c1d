"""Steps of several methods timed in turns: all of them in every round, so that a machine's moods meet all alike."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compress import Hook, compress
from ...measure import Breakdown
from ..choice import Choice
from ..rivals import SAM

#: Of all methods, before any counts: buckets are rebuilt, memory is warm.
WARM_UP = 2
#: Steps of a turn: as many as take about so many seconds, and not more than these.
LONG, MOST = 0.3, 20

Round = dict[str, dict[str, Any]]  # by method


class Contender:
    """A model that is trained by a method, a step at a time. Make it on all ranks.

    Args:
        chosen: what compresses its gradients.
        model: as it is built.
        optimizer: made for the model.
        loss: of one batch, always the same.
        become: makes of the model, in DDP, and the optimizer what a run has made of them at its end: low rank, or a ticket.
        clip: largest norm of the gradients.
    """

    def __init__(
        self,
        chosen: Choice,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        loss: Callable[[nn.Module], Tensor],
        become: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
        clip: float | None = None,
    ) -> None:
        self.chosen, self.bare, self.loss, self.clip = chosen, model, loss, clip
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = next(model.parameters()).device
        self.ddp = DistributedDataParallel(model) if self.size > 1 else None
        self.optimizer = optimizer(model)
        if isinstance(self.optimizer, SAM):
            self.optimizer.model = self.ddp or model  # whose first pass is not sent
        self.hook: Hook | None = None
        if self.ddp is not None and chosen.compress is not None:
            made = compress(self.ddp, chosen.compress, optimizer=self.optimizer)
            assert isinstance(made, Hook)
            self.hook = made
        if become is not None:
            become(self.ddp or model, self.optimizer)

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
        self.loss(self.ddp or self.bare).backward()

    def turn(self, steps: int, exchange: bool = True) -> dict[str, float]:
        """Mean seconds of so many steps, and of their parts (see `Breakdown`); all ranks begin and end together."""
        watched = Breakdown(self.ddp or self.bare, self.optimizer)
        self._together()
        begun = time.perf_counter()
        with watched:
            for _ in range(steps):
                self.step(exchange)
            self._together()
            seconds = (time.perf_counter() - begun) / steps
        return watched.parts | {"step": seconds}

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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            dist.barrier()


def steps_a_turn(contenders: Mapping[str, Contender]) -> dict[str, int]:
    """Warm all up; then how many steps of each take long enough to be timed. The same on all ranks."""
    taken = {}
    for _ in range(WARM_UP):
        for name, contender in contenders.items():
            taken[name] = contender.turn(1)["step"]
            if contender.size > 1:
                contender.turn(1, exchange=False)
    found = torch.tensor([min(MOST, max(1, round(LONG / seconds))) for seconds in taken.values()])
    if dist.is_initialized():
        found = found.to(next(iter(contenders.values())).device)
        dist.broadcast(found, 0)
    return dict(zip(contenders, found.tolist(), strict=True))


def interleaved(
    contenders: Mapping[str, Contender], count: int, steps: Mapping[str, int], first: int = 0
) -> Iterator[Round]:
    """Rounds, from the one numbered `first`: in each all have their turn, in rotating order, with exchange and without.

    One worker has no exchange, and no "alone".
    """
    names = list(contenders)
    for turn in range(first, first + count):
        found: Round = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            contender = contenders[name]
            parts = contender.turn(steps[name])
            nbytes, messages = contender.sent()
            found[name] = {
                "seconds": parts.pop("step"),
                "parts": parts,
                "bytes": nbytes,
                "messages": messages,
            }
            if contender.size > 1:
                found[name]["alone"] = contender.turn(steps[name], exchange=False)["step"]
        yield {name: found[name] for name in names}


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0]), quartiles([2.0])
    ([2.0, 3.0, 4.0], [2.0, 2.0, 2.0])
    """
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3


def ratios(rounds: Sequence[Round], name: str, against: str) -> list[float]:
    """How many times as fast as another a method was, in each round that has both.

    >>> ratios([{"a": {"seconds": 3.0}, "b": {"seconds": 1.5}}, {"a": {"seconds": 1.0}}], "b", "a")
    [2.0]
    """
    return [r[against]["seconds"] / r[name]["seconds"] for r in rounds if name in r and against in r]
