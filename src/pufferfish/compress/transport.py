"""How messages get to the other workers: over a process group, or among workers simulated in this process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .meter import Meter


class Transport:
    """Three collectives on flat buffers, each counted. Lists are over the workers that live in this process."""

    size: int  # workers in all
    ranks: tuple[int, ...]  # those that live here

    def __init__(self) -> None:
        self.meter = Meter()

    def sum(self, mine: list[Tensor]) -> list[Tensor]:
        """The sum of all workers' buffers, in buffers of one's own."""
        if mine[0].numel() == 0:
            return mine
        self.meter.count("all_reduce", mine[0].nbytes, self.size)
        with self.meter.exchange():
            return self._sum(mine)

    def gather(self, mine: list[Tensor]) -> list[list[Tensor]]:
        """All workers' buffers; they are of one size."""
        if mine[0].numel() == 0:
            return [[x] * self.size for x in mine]
        self.meter.count("all_gather", mine[0].nbytes, self.size)
        with self.meter.exchange():
            return self._gather(mine)

    def scatter(self, mine: list[list[Tensor]]) -> list[list[Tensor]]:
        """What all workers have for us; `mine[i][j]` goes to worker j and is of one size wherever it comes from."""
        nbytes = sum(piece.nbytes for piece in mine[0])
        if nbytes == 0:
            return mine
        self.meter.count("all_to_all", nbytes, self.size)
        with self.meter.exchange():
            return self._scatter(mine)

    def _sum(self, mine: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError

    def _gather(self, mine: list[Tensor]) -> list[list[Tensor]]:
        raise NotImplementedError

    def _scatter(self, mine: list[list[Tensor]]) -> list[list[Tensor]]:
        raise NotImplementedError


class Group(Transport):
    """The processes of a group; without one, of the whole job, or this process alone.

    >>> Group().size
    1
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group: Any = group
        self.size = dist.get_world_size(group) if group else 1
        self.ranks = (dist.get_rank(group) if group else 0,)

    def _sum(self, mine: list[Tensor]) -> list[Tensor]:
        if self.size > 1:
            dist.all_reduce(mine[0], group=self.group)
        return mine

    def _gather(self, mine: list[Tensor]) -> list[list[Tensor]]:
        if self.size == 1:
            return [mine]
        everyone = [torch.empty_like(mine[0]) for _ in range(self.size)]
        dist.all_gather(everyone, mine[0], group=self.group)
        return [everyone]

    def _scatter(self, mine: list[list[Tensor]]) -> list[list[Tensor]]:
        (pieces,) = mine
        if self.size == 1:
            return [pieces]
        n = pieces[self.ranks[0]].numel()
        received = pieces[0].new_empty(n * self.size)
        dist.all_to_all_single(
            received, torch.cat(pieces), [n] * self.size, [p.numel() for p in pieces], group=self.group
        )
        return [list(received.split(n))] if n else [[received] * self.size]


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

    def _sum(self, mine: list[Tensor]) -> list[Tensor]:
        total = mine[0].clone()
        for x in mine[1:]:
            total += x
        return [total.clone() for _ in mine]

    def _gather(self, mine: list[Tensor]) -> list[list[Tensor]]:
        return [mine for _ in mine]

    def _scatter(self, mine: list[list[Tensor]]) -> list[list[Tensor]]:
        return [[theirs[rank] for theirs in mine] for rank in self.ranks]
