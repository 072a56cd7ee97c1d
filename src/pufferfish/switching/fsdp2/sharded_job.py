"""`ShardedJob`: an FSDP2 model as it is trained, and computations on its gathered weights."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import TypeVar

from torch import Tensor, nn

from ...distributed.ddp import Job, svd_cost
from ...distributed.workers import Workers
from ...optim.carry import whole
from ...planning.plan import Entry
from ...planning.planner import matrix_spectrum
from .outline import check_finite, outline, parameters

T = TypeVar("T")


class ShardedJob(Job):
    """A `Job` whose parameters are shards: plans are made for the model that `build` returns on the meta device."""

    def __init__(self, model: nn.Module, build: Callable[[], nn.Module]) -> None:
        super().__init__(model, "switch.rebuild")
        self.build = build

    @cached_property
    def dense(self) -> nn.Module:
        return outline(self.model, self.build)

    def own_spectra(
        self, weights: list[tuple[Entry, nn.Parameter]], owner: Mapping[str, int]
    ) -> dict[str, Tensor]:
        entries, shards = [e for e, _ in weights], parameters(self.model)
        check_finite({name: shards[name] for name in by_weight(entries)}, self.workers)
        results: dict[str, Tensor] = {}
        for _, _, own in in_rounds(entries, owner, shards, self.workers, matrix_spectrum):
            results |= own
        return results


def in_rounds(
    entries: Iterable[Entry],
    owner: Mapping[str, int],
    weights: Mapping[str, Tensor],
    workers: Workers,
    work: Callable[[Entry, Tensor], T],
) -> Iterator[tuple[str, int, dict[str, T]]]:
    """Gather each weight and call `work` with its matrices on the worker that owns it.

    In a round every worker works on one weight, so it holds at most two whole weights: its own, and the one that is
    being gathered for another worker. Small weights come first, so that their shards are freed before the large ones
    are gathered.

    Yields:
        The name of a weight, the rank of its owner, and on that worker the results by entry name.
    """
    groups = by_weight(entries)
    cost = {name: sum(svd_cost(e.matrix) for e in group if e.matrix) for name, group in groups.items()}
    queues: list[list[str]] = [[] for _ in range(workers.size)]
    for name in sorted(groups, key=cost.__getitem__, reverse=True):
        queues[owner[groups[name][0].name]].append(name)
    for names in reversed(list(itertools.zip_longest(*queues))):
        own_name, weight = "", None
        for rank, name in enumerate(names):
            if name is not None:
                full = whole(weights[name])
                if rank == workers.rank:
                    own_name, weight = name, full
                del full
        results = workers.run_on_all(partial(_results, groups.get(own_name, []), weight, work))
        weight = None
        for rank, name in enumerate(names):
            if name is not None:
                yield name, rank, results if name == own_name else {}


def _results(entries: list[Entry], weight: Tensor | None, work: Callable[[Entry, Tensor], T]) -> dict[str, T]:
    return {} if weight is None else {e.name: work(e, weight) for e in entries}


def by_weight(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group matrices by the parameter that holds them."""
    groups: dict[str, list[Entry]] = {}
    for e in entries:
        assert e.matrix is not None
        groups.setdefault(f"{e.layer}.{e.matrix.weight}", []).append(e)
    return groups
