"""`skip_batches` against a whole epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from pufferfish.checkpoint.process import skip_batches


class Squares(Dataset[int]):
    """Records the indices it loads."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index * index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for i in range(23):
            random.random()
            yield i


def distributed(epoch: int) -> DistributedSampler[int]:
    sampler = DistributedSampler(Squares(), num_replicas=2, rank=1, seed=5)
    sampler.set_epoch(epoch)
    return sampler


LOADERS: dict[str, Any] = {
    "in order": lambda data: DataLoader(data, batch_size=4),
    "drop_last": lambda data: DataLoader(data, batch_size=4, drop_last=True),
    "distributed": lambda data: DataLoader(data, batch_size=2, sampler=distributed(3)),
    "generator": lambda data: DataLoader(
        data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "own batches": lambda data: DataLoader(data, batch_sampler=BatchSampler(distributed(0), 5, False)),
    "no batches": lambda data: DataLoader(data, batch_size=None),
    "two workers": lambda data: DataLoader(data, batch_size=4, num_workers=2),
}


@pytest.mark.parametrize("name", LOADERS)
def test_skips_the_first_batches(name: str) -> None:
    whole = [x.tolist() if isinstance(x, torch.Tensor) else x for x in LOADERS[name](Squares())]
    for n in (0, 2, len(whole)):
        data = Squares()
        loader = LOADERS[name](data)
        found = [x.tolist() if isinstance(x, torch.Tensor) else x for x in skip_batches(loader, n)]
        assert found == whole[n:]
        if loader.num_workers == 0:
            flat = [x for batch in found for x in (batch if isinstance(batch, list) else [batch])]
            assert [i * i for i in data.loaded] == flat  # and nothing else was loaded
        assert len(loader) == len(whole)  # the loader itself is as it was


def test_a_stream_is_read_through() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    assert [x.tolist() for x in skip_batches(loader, 4)] == [[16, 17, 18, 19], [20, 21, 22]]
    assert list(skip_batches(loader, 99)) == []


@pytest.mark.parametrize("name", ["in order", "distributed", "stream"])
def test_global_generators_continue_as_if_uninterrupted(name: str) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=4) if name == "stream" else LOADERS[name](Squares())

    def draws(batches: Any) -> list[float]:
        return [torch.rand(1).item() + random.random() for _ in batches]

    random.seed(1)
    torch.manual_seed(1)
    straight = draws(make())
    random.seed(1)
    torch.manual_seed(1)
    first = iter(make())
    begun = draws(islice(first, 3))
    state = torch.get_rng_state(), random.getstate()
    random.seed(99)
    torch.manual_seed(99)
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    assert begun + draws(skip_batches(make(), 3)) == straight


def test_more_than_an_epoch_is_refused() -> None:
    with pytest.raises(
        ValueError, match="n=7, but an epoch has 6 batches; count from the start of the epoch"
    ):
        next(skip_batches(DataLoader(Squares(), batch_size=4), 7))
