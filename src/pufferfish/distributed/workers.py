"""What the workers of a job do together at the switch: agree, share the work, hold the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..layers import Matrix

T = TypeVar("T")


class Workers:
    """The processes of one group, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, who: str = "switch") -> None:
        self.group = group
        self.who = who  # asks them, in errors
        self.device = device  # where the group's collectives want their tensors
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    def agree(self, facts: str, decision: int, about: str) -> int:
        """Rank 0's decision (a byte), after one collective that finds out whether all say the same `facts`.

        The message has a fixed size and every rank gets every answer: a difference is the same error
        everywhere, never a hang.
        """
        if self.size == 1:
            return decision
        mine = torch.tensor([*hashlib.sha256(facts.encode()).digest(), decision], dtype=torch.uint8)
        answers = self._gather(mine)
        others = [r for r in range(self.size) if answers[r][:-1] != answers[0][:-1]]
        if others:
            raise RuntimeError(f"{self.who}: ranks {others} differ from rank 0 in {about}")
        return answers[0][-1]

    def together(self, check: Callable[[], T]) -> T:
        """What `check` returns. What is wrong on one rank alone stops the others too: they would wait for it."""
        problem: Exception | None = None
        try:
            result = check()
        except Exception as error:
            problem = error
        told = "nothing, see the messages of the others" if problem is None else problem
        self.agree(repr(problem), 0, f"what keeps them from going on; on rank {self.rank}: {told}")
        if problem is not None:
            raise problem
        return result

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Check that all ranks hold the same bits."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for x in tensors:
            digest.update(x.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        answers = self._gather(torch.tensor(list(digest.digest()), dtype=torch.uint8))
        assert all(answer == answers[0] for answer in answers), (
            "ranks hold different factors after the switch"
        )

    def tell(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.size == 1:
            return text
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor([len(data)], device=self.device)
        dist.broadcast(length, group=self.group, group_src=0)
        data = data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, group=self.group, group_src=0)
        return bytes(data.cpu().tolist()).decode()

    def share(self, tensor: Tensor, owner: int) -> Tensor:
        """`tensor` as the rank `owner` has it."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=owner)
        return tensor

    def largest(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        if self.size > 1:
            values = values.to(self.device)
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values.cpu()

    def _gather(self, mine: Tensor) -> list[list[int]]:
        mine = mine.to(self.device)
        answers = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(answers, mine, group=self.group)
        return [answer.tolist() for answer in answers]


def svd_cost(x: Matrix) -> float:
    """About the FLOPs of one split: the Gram matrix and its eigenvectors."""
    short, long = sorted((x.m, x.n))
    return x.blocks * (2.0 * short * short * long + 9.0 * short**3)


def balanced(costs: Sequence[float], workers: int) -> list[int]:
    """Which worker takes which piece: the largest first, each to the one with least to do.

    >>> balanced([5, 4, 3, 3], 2)
    [0, 1, 1, 0]
    """
    load = [0.0] * workers
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[i] = min(range(workers), key=load.__getitem__)
        load[owner[i]] += costs[i]
    return owner
