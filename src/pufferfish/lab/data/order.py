"""Which rows come in which batch: the same for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor


class Splits:
    """The tensors of each split, on any device: they are copied there once.

    >>> data = Splits({"train": (torch.zeros(4, 2), torch.zeros(4))})
    >>> [tuple(x.shape) for x in data.on("train", "cpu")]
    [(4, 2), (4,)]
    """

    def __init__(self, splits: Mapping[str, tuple[Tensor, ...]]) -> None:
        self._splits = dict(splits)
        self._there: dict[tuple[str, torch.device], tuple[Tensor, ...]] = {}

    def on(self, split: str, device: torch.device | str) -> tuple[Tensor, ...]:
        """The tensors of `split` on `device`."""
        if split not in self._splits:
            raise ValueError(f"there is no split {split!r}; there are {', '.join(self._splits)}")
        key = split, torch.device(device)
        if key not in self._there:
            self._there[key] = tuple(x.to(device) for x in self._splits[split])
        return self._there[key]

    def size(self, split: str) -> int:
        """How many rows `split` has."""
        return len(self.on(split, "cpu")[0])


@dataclass(frozen=True)
class Epoch:
    """Which batches of an epoch are asked for.

    Args:
        split: "train" is shuffled, others come in order, all of them.
        batch: rows of all workers together.
        device: where the batches are to be.
        generator: draws the order; in the same state on all workers.
        rank, size: whose share of each batch, of how many workers; each gets the same number of batches.
        start: number of the first batch, when an epoch goes on.

    >>> epoch = Epoch("test", 4, rank=1, size=2, start=1)
    >>> [epoch.share(rows).tolist() for rows in epoch.order(10)]
    [[6, 7], [9]]
    """

    split: str
    batch: int
    device: torch.device | str = "cpu"
    generator: torch.Generator | None = None
    rank: int = 0
    size: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} among {self.size} workers")
        if self.training and self.batch % self.size:  # else their gradients would not weigh the same
            raise ValueError(
                f"a batch of {self.batch} cannot be shared evenly by {self.size} workers; take a multiple of {self.size}"
            )

    @property
    def training(self) -> bool:
        """Whether it is shuffled, and of whole batches."""
        return self.split == "train"

    def order(self, n: int, what: str = "rows", device: torch.device | str | None = None) -> Iterator[Tensor]:
        """Row numbers of each batch of all workers, out of `n`, from `start` on.

        They go to the device all at once: to send a batch's alone would wait for the batch before.
        """
        device = self.device if device is None else device
        if not self.training:
            rows = torch.arange(n, device=device)
        else:
            count = steps(n, self.batch, what) * self.batch
            rows = drawn(n, self.generator).argsort()[:count].to(device)
        return islice(iter(rows.split(self.batch)), self.start, None)

    def share(self, rows: Tensor) -> Tensor:
        """Those of `rows` that are this worker's."""
        return rows[self.part(len(rows))]

    def part(self, n: int) -> slice:
        """Which of `n` are this worker's."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)


def steps(n: int, batch: int, what: str = "rows") -> int:
    """Whole batches in `n` rows.

    >>> steps(10, 4)
    2
    """
    if not 1 <= batch <= n:
        raise ValueError(f"a batch of {batch:,} cannot be filled: there are {n:,} {what}")
    return n // batch


def drawn(shape: int | tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Numbers from 0 to 1. Without a generator workers would draw different ones, so it is refused."""
    if generator is None:
        raise ValueError(
            "training batches are drawn at random: pass a generator, in the same state on all workers"
        )
    shape = (shape,) if isinstance(shape, int) else shape
    return torch.rand(shape, generator=generator, device=generator.device)


def held_out(n: int, held: int) -> tuple[Tensor, Tensor]:
    """Row numbers to train on and to validate on, the same `held` of them on every machine and in every run.

    >>> train, valid = held_out(10, 3)
    >>> len(train), len(valid), sorted(train.tolist() + valid.tolist()) == list(range(10))
    (7, 3, True)
    """
    if not 0 <= held < n:
        raise ValueError(f"{held:,} rows cannot be held out of {n:,}")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return order[held:].sort().values, order[:held].sort().values
