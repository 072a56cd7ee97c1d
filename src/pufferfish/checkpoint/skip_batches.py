"""`skip_batches`: go on in the middle of an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .random_state import rng_state, set_rng_state


def skip_batches(loader: DataLoader[Any], n: int) -> _Rest:
    """This epoch's batches of `loader` after the first `n`, for a run resumed in the middle of it.

    They are skipped where the indices are drawn, so nothing is loaded for them; only an `IterableDataset` has
    to be read through. The global random numbers are left where `resume` put them.

    The order must not hang on those: `DistributedSampler` with `set_epoch`, a sampler with a `generator` seeded
    by the epoch, or none. `shuffle=True` without a generator draws it from the global numbers, so such a run
    resumes exactly at the border of an epoch only. Worker processes get new seeds: what they draw is not repeated.

    >>> loader = DataLoader(list(range(10)), batch_size=4)
    >>> [batch.tolist() for batch in skip_batches(loader, 1)]
    [[4, 5, 6, 7], [8, 9]]
    """
    if n < 0:
        raise ValueError(f"skip_batches: {n} batches cannot be skipped")
    readable = isinstance(loader.dataset, IterableDataset)
    if not readable and n > len(loader):
        raise ValueError(
            f"skip_batches: {n} of {len(loader)} batches; count from the start of the epoch, not of the run"
        )
    return _Rest(loader, n)


class _Rest:
    def __init__(self, loader: DataLoader[Any], n: int) -> None:
        self._loader, self._n = loader, n

    def __len__(self) -> int:
        return len(self._loader) - self._n

    def __iter__(self) -> Iterator[Any]:
        loader, n = self._loader, self._n
        if n == 0:
            return iter(loader)
        before = rng_state()  # an epoch draws a number when it begins: this one has
        if isinstance(loader.dataset, IterableDataset):
            batches = iter(loader)
            for _ in islice(batches, n):
                pass
        else:
            rest = copy.copy(loader)
            # The one that gives indices. A made loader refuses a new one by its setter.
            which = "sampler" if loader.batch_sampler is None else "batch_sampler"
            vars(rest).update({which: _Skipping(getattr(loader, which), n), "_iterator": None})
            batches = iter(rest)
        set_rng_state(before)
        return batches


class _Skipping:
    def __init__(self, sampler: Any, n: int) -> None:
        self._sampler, self._n = sampler, n

    def __len__(self) -> int:
        return len(self._sampler) - self._n

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._n, None)
