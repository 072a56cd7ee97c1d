"""`skip_batches`: resume in the middle of an epoch."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .rng_state import rng_state, set_rng_state


def skip_batches(loader: DataLoader[Any], n: int) -> Iterator[Any]:
    """Iterate over an epoch of `loader` without its first `n` batches, for a run resumed in mid-epoch.

    Only indices are skipped, so no data is loaded for them; an `IterableDataset` has to be read up to that
    point. The global random number generators keep the state that `resume` restored.

    The order of the data must not depend on those generators: use `DistributedSampler` with `set_epoch`, a
    sampler with a `generator` seeded by the epoch, or no shuffling. With `shuffle=True` and no generator a run
    resumes exactly only at the start of an epoch. Loader worker processes get new seeds, so random numbers
    drawn there are not reproduced.

    >>> loader = DataLoader(list(range(10)), batch_size=4)
    >>> [batch.tolist() for batch in skip_batches(loader, 1)]
    [[4, 5, 6, 7], [8, 9]]
    """
    if n == 0:
        yield from loader
        return
    stream = isinstance(loader.dataset, IterableDataset)
    if not stream and n > len(loader):
        raise ValueError(
            f"skip_batches: n={n}, but an epoch has {len(loader)} batches; count from the start of the epoch, "
            "not of the run"
        )
    before = rng_state()  # the start of an epoch draws a number, which the interrupted run already drew
    if stream:
        batches = iter(loader)
        for _ in islice(batches, n):
            pass
    else:
        rest = copy.copy(loader)
        # A DataLoader refuses to have its samplers set as attributes.
        attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(rest).update({attribute: islice(getattr(loader, attribute), n, None), "_iterator": None})
        batches = iter(rest)
    set_rng_state(before)
    yield from batches
