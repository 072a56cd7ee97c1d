"""How messages get to the other workers: over a process group, or among workers simulated in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .meter import Meter

T = TypeVar("T")
# all_gather_into_tensor and reduce_scatter_tensor, by the names torch 2.13 has given them
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: A collective under way: call it to wait, for what has come.
Coming = Callable[[], T]


class Transport:
    """Three collectives on flat buffers, each counted. Lists are over the workers that live in this process.

    Each begins at once; the exchange is timed while somebody waits for it.
    """

    size: int  # workers in all
    ranks: tuple[int, ...]  # those that live here
    inside: bool = False  # whether it never leaves a machine

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter or Meter()

    def sum(self, mine: list[Tensor]) -> Coming[list[Tensor]]:
        """The sum of all workers' buffers, in those buffers."""
        return self._begun("all_reduce", mine[0].nbytes, mine, lambda: self._sum(mine))

    def gather(self, mine: list[Tensor]) -> Coming[list[list[Tensor]]]:
        """All workers' buffers; they are of one size."""
        nothing = [[x] * self.size for x in mine]
        return self._begun("all_gather", mine[0].nbytes, nothing, lambda: self._gather(mine))

    def scatter(self, mine: list[list[Tensor]]) -> Coming[list[list[Tensor]]]:
        """What all workers have for us; `mine[i][j]` goes to worker j and is of one size wherever it comes from."""
        nbytes = sum(piece.nbytes for piece in mine[0])
        return self._begun("all_to_all", nbytes, mine, lambda: self._scatter(mine))

    def _begun(self, kind: str, nbytes: int, nothing: T, begin: Callable[[], Coming[T]]) -> Coming[T]:
        if nbytes == 0:
            return lambda: nothing
        self.meter.count(kind, nbytes, self.size, self.inside)
        self.meter.begin()
        coming = begin()

        def wait() -> T:
            with self.meter.exchange():
                return coming()

        return wait

    def _sum(self, mine: list[Tensor]) -> Coming[list[Tensor]]:
        raise NotImplementedError

    def _gather(self, mine: list[Tensor]) -> Coming[list[list[Tensor]]]:
        raise NotImplementedError

    def _scatter(self, mine: list[list[Tensor]]) -> Coming[list[list[Tensor]]]:
        raise NotImplementedError


class Group(Transport):
    """The processes of a group; without one, of the whole job, or this process alone.

    >>> Group().size
    1
    """

    def __init__(self, group: dist.ProcessGroup | None = None, meter: Meter | None = None) -> None:
        super().__init__(meter)
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group: Any = group
        self.size = dist.get_world_size(group) if group else 1
        self.ranks = (dist.get_rank(group) if group else 0,)

    def _sum(self, mine: list[Tensor]) -> Coming[list[Tensor]]:
        if self.size == 1:
            return lambda: mine
        return _after(dist.all_reduce(mine[0], group=self.group, async_op=True), lambda: mine)

    def _gather(self, mine: list[Tensor]) -> Coming[list[list[Tensor]]]:
        (x,) = mine
        if self.size == 1:
            return lambda: [mine]
        everyone = x.new_empty(self.size * len(x))
        work = all_gather(everyone, x, group=self.group, async_op=True)
        return _after(work, lambda: [list(everyone.split(len(x)))])

    def _scatter(self, mine: list[list[Tensor]]) -> Coming[list[list[Tensor]]]:
        (pieces,) = mine
        if self.size == 1:
            return lambda: [pieces]
        n = len(pieces[self.ranks[0]])
        sent, received = torch.cat(pieces), pieces[0].new_empty(n * self.size)
        work = dist.all_to_all_single(
            received, sent, [n] * self.size, [len(p) for p in pieces], group=self.group, async_op=True
        )
        return _after(work, lambda: [list(received.split(n))] if n else [[received] * self.size])


def _after(work: Any, then: Callable[[], T]) -> Coming[T]:
    def wait() -> T:
        work.wait()
        return then()

    return wait


class Simulated(Transport):
    """`size` workers in one process, on one device: the numbers of real ones, without a network.

    With three or more workers the last bit of a sum depends on the order of its terms, which every backend
    chooses for itself: methods that sum agree with real workers up to rounding, the others bit for bit.

    >>> Simulated(4).ranks
    (0, 1, 2, 3)
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"Simulated: {size} workers make no job; take 1 or more")
        self.size = size
        self.ranks = tuple(range(size))

    def _sum(self, mine: list[Tensor]) -> Coming[list[Tensor]]:
        total, *others = mine
        for x in others:
            total += x
        for x in others:
            x.copy_(total)
        return lambda: mine

    def _gather(self, mine: list[Tensor]) -> Coming[list[list[Tensor]]]:
        return lambda: [mine for _ in mine]

    def _scatter(self, mine: list[list[Tensor]]) -> Coming[list[list[Tensor]]]:
        return lambda: [[theirs[rank] for theirs in mine] for rank in self.ranks]
