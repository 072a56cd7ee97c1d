"""`Simulated`: the updates of several workers, by one process on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compression import NoCompression
from ..tasks.task import Batch
from .graph import Graph
from .parts import Parts
from .simulated_ddp import SimulatedDDP
from .updates import Updates


class Simulated(Updates):
    """What `parts.size` workers under DDP do to the model: each has its batches, its dropout, its compression's memory.

    In a CUDA graph are the passes of all workers. The exchange is not: what methods keep changes on the host as well.
    """

    def __init__(self, parts: Parts) -> None:
        seeds = [worker_seed(parts.given.seed, rank) for rank in range(parts.size)]
        self.workers = SimulatedDDP(
            parts.bare, parts.given.choice.compress or NoCompression(), parts.size, optimizer=parts.optimizer,
            scaler=parts.scaler if parts.scaler.is_enabled() else None, seeds=seeds,
        )  # fmt: skip
        super().__init__(parts)
        self.ranks = list(range(parts.size))

    def changed(self) -> None:
        assert self.workers.streams is not None
        drawn = self.workers.streams.generators
        self._passes: Any = Graph(self._all, generators=drawn) if self.parts.given.graph else self._all
        self._run = self._update

    def state_dict(self) -> dict[str, Any]:
        assert self.workers.streams is not None
        return super().state_dict() | {"streams": self.workers.streams.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.workers.streams is not None
        super().load_state_dict(state)
        self.workers.streams.load_state_dict(state["streams"])

    def _update(self, inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        gradients, loss = self._passes(inputs, carried)
        self.workers.average(gradients)
        self._step()
        return loss  # type: ignore[no-any-return]

    def _all(
        self, inputs: Sequence[Tensor], carried: Sequence[Tensor]
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Every worker's gradients, and the first one's loss."""
        total = torch.zeros((), device=self.parts.device)

        def losses(worker: int, batches: list[Batch]) -> Iterator[Tensor]:
            for batch in batches:
                loss = self._loss(batch) / len(batches)
                if worker == 0:
                    total.add_(loss.detach())
                yield self.parts.scaler.scale(loss)

        own = [(worker, self._of(worker, inputs, carried)) for worker in self.ranks]
        return self.workers.gradients(losses, own), total


def worker_seed(seed: int, rank: int) -> int:
    """Of what a worker draws while it trains: dropout differs between them.

    >>> worker_seed(0, 1)
    2000
    """
    return seed + 1000 * (rank + 1)
