"""`BatchOrder`: which rows are in which batch of an epoch, the same for any number of workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

Device = torch.device | str


@dataclass(frozen=True)
class BatchOrder:
    """Batches of one epoch, and one worker's share of each. All workers get the same number of batches.

    >>> order = BatchOrder("test", 4, worker=1, world_size=2, start=1)
    >>> [order.shard(rows).tolist() for rows in order.batches(10)]
    [[6, 7], [9]]
    """

    split: str  # "train" is shuffled and has whole batches only; other splits are in order and complete
    batch: int  # global batch size
    device: Device = "cpu"  # of the batches
    generator: torch.Generator | None = None  # of the random order; in the same state on all workers
    worker: int = 0  # index of this worker
    world_size: int = 1  # number of workers
    start: int = 0  # index of the first batch, to resume an epoch

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.world_size:
            raise ValueError(f"worker {self.worker} does not exist among {self.world_size} workers")
        if self.training and self.batch % self.world_size:  # unequal shares would weigh gradients unequally
            raise ValueError(
                f"a batch of {self.batch} cannot be divided evenly among {self.world_size} workers; "
                f"use a multiple of {self.world_size}"
            )

    @property
    def training(self) -> bool:
        """Whether the split is shuffled and has whole batches only."""
        return self.split == "train"

    def batches(self, n: int, unit: str = "rows", device: Device | None = None) -> Iterator[Tensor]:
        """Row indices of each global batch, from `start` on, on `device` (default: that of the batches).

        All indices are copied to the device at once, because a copy per batch would wait for the previous batch.
        `unit` names the rows in error messages.
        """
        device = self.device if device is None else device
        if not self.training:
            rows = torch.arange(n, device=device)
        else:
            count = steps_per_epoch(n, self.batch, unit) * self.batch
            rows = uniform(n, self.generator).argsort()[:count].to(device)
        return islice(iter(rows.split(self.batch)), self.start, None)

    def shard(self, rows: Tensor) -> Tensor:
        """This worker's part of `rows`."""
        return rows[self.shard_slice(len(rows))]

    def shard_slice(self, n: int) -> slice:
        """Slice of this worker's part of `n` rows."""
        return slice(n * self.worker // self.world_size, n * (self.worker + 1) // self.world_size)


def steps_per_epoch(n: int, batch: int, unit: str = "rows") -> int:
    """Number of whole batches in `n` rows.

    >>> steps_per_epoch(10, 4)
    2
    """
    if not 1 <= batch <= n:
        raise ValueError(f"a batch of {batch:,} cannot be filled: there are {n:,} {unit}")
    return n // batch


def uniform(shape: int | tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Random numbers between 0 and 1. A generator is required, because workers must draw the same numbers."""
    if generator is None:
        raise ValueError("training batches are random: pass a generator in the same state on all workers")
    shape = (shape,) if isinstance(shape, int) else shape
    return torch.rand(shape, generator=generator, device=generator.device)
