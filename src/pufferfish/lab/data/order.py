"""Which rows come in which batch: the same for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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


def steps(n: int, batch: int, what: str = "rows") -> int:
    """Whole batches in `n` rows.

    >>> steps(10, 4)
    2
    """
    if not 1 <= batch <= n:
        raise ValueError(f"a batch of {batch:,} cannot be filled: there are {n:,} {what}")
    return n // batch


def share(n: int, rank: int, size: int) -> slice:
    """Which of the `n` rows of a batch are those of `rank`.

    >>> share(8, 1, 4), share(3, 0, 2), share(3, 1, 2)
    (slice(2, 4, None), slice(0, 1, None), slice(1, 3, None))
    """
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} among {size} workers")
    return slice(n * rank // size, n * (rank + 1) // size)


def even(batch: int, size: int) -> None:
    """Refuse a training batch that workers cannot share evenly: their gradients would not weigh the same."""
    if batch % size:
        raise ValueError(
            f"a batch of {batch} cannot be shared evenly by {size} workers; take a multiple of {size}"
        )


def shuffled(
    n: int,
    batch: int,
    generator: torch.Generator | None,
    what: str = "rows",
    device: torch.device | str | None = None,
) -> Iterator[Tensor]:
    """An epoch's whole batches of row numbers, over all workers, in an order drawn from `generator`.

    They go to `device` all at once: to send a batch's alone would wait for the batch before.
    """
    count = steps(n, batch, what)
    order = drawn(n, generator).argsort().to(device)
    return (order[i * batch : (i + 1) * batch] for i in range(count))


def drawn(shape: int | tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Numbers from 0 to 1. Without a generator workers would draw different ones, so it is refused."""
    if generator is None:
        raise ValueError(
            "training batches are drawn at random: pass a generator, in the same state on all workers"
        )
    shape = (shape,) if isinstance(shape, int) else shape
    return torch.rand(shape, generator=generator, device=generator.device)


def in_order(n: int, batch: int, device: torch.device | str | None = None) -> Iterator[Tensor]:
    """All rows, batch by batch; the last one may be smaller."""
    return iter(torch.arange(n, device=device).split(batch))


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
