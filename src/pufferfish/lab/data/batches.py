"""Splits of a data set, and which rows are in which batch of an epoch, the same for any number of workers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

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


class Splits:
    """Tensors of each split, copied once to every device that uses them.

    >>> data = Splits({"train": (torch.zeros(4, 2), torch.zeros(4))})
    >>> [tuple(x.shape) for x in data.on("train", "cpu")]
    [(4, 2), (4,)]
    """

    def __init__(self, splits: Mapping[str, tuple[Tensor, ...]]) -> None:
        self._splits = dict(splits)
        self._copies: dict[tuple[str, torch.device], tuple[Tensor, ...]] = {}

    def on(self, split: str, device: torch.device | str) -> tuple[Tensor, ...]:
        """Tensors of `split` on `device`."""
        if split not in self._splits:
            raise ValueError(f"split {split!r} does not exist; choose from {', '.join(self._splits)}")
        key = split, torch.device(device)
        if key not in self._copies:
            self._copies[key] = tuple(x.to(device) for x in self._splits[split])
        return self._copies[key]

    def size(self, split: str) -> int:
        """Number of rows in `split`."""
        return len(self.on(split, "cpu")[0])


def hold_out(n: int, held: int) -> tuple[Tensor, Tensor]:
    """Split `n` row indices into training and `held` for validation, the same in every run on every machine.

    >>> train, valid = hold_out(10, 3)
    >>> len(train), len(valid), sorted(train.tolist() + valid.tolist()) == list(range(10))
    (7, 3, True)
    """
    if not 0 <= held < n:
        raise ValueError(f"cannot hold out {held:,} of {n:,} rows")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return order[held:].sort().values, order[:held].sort().values


class Rows:
    """Rows of a data set, read as batches. Tensors are copied once to every device that uses them.

    Args:
        source: a tuple of tensors or arrays of equal length, or a map-style dataset whose items are tuples.

    >>> rows = Rows((torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])))
    >>> len(rows), rows.batch(torch.tensor([1, 3]))
    (4, (tensor([[2., 3.],
            [6., 7.]]), tensor([1, 1])))
    """

    def __init__(self, source: Any) -> None:
        parts = source.tensors if isinstance(source, TensorDataset) else source
        self._tensors: dict[torch.device, Sequence[Tensor]] = {}
        if isinstance(parts, tuple | list) and parts and all(isinstance(x, Tensor | ndarray) for x in parts):
            lengths = [len(x) for x in parts]
            if len(set(lengths)) > 1:
                raise ValueError(f"its tensors have {' and '.join(f'{n:,}' for n in lengths)} rows")
            self._length = lengths[0]
            self._tensors[torch.device("cpu")] = [torch.as_tensor(x).cpu() for x in parts]
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, tuple):
            self._length = len(source)
        else:
            raise ValueError(
                f"it is of type {type(source).__name__}, neither a tuple of tensors nor a Dataset"
            )
        self._source = source

    def __len__(self) -> int:
        return self._length

    @property
    def in_memory(self) -> bool:
        """Whether the rows are tensors, which are indexed on the device."""
        return bool(self._tensors)

    def batch(self, rows: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """The rows of these numbers, as tensors on `device`."""
        if not self.in_memory:
            items = [self._source[i] for i in rows.tolist()]
            if not isinstance(items[0], tuple | list):
                raise ValueError(f"its rows are of type {type(items[0]).__name__}, not tuples")
            return tuple(x.to(device) for x in default_collate(items))
        device = torch.device(device)
        if device not in self._tensors:
            self._tensors[device] = [x.to(device) for x in self._tensors[torch.device("cpu")]]
        return tuple(x[rows] for x in self._tensors[device])
