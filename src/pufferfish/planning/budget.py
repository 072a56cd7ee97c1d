"""Sharing a budget among matrices: rank goes where the singular values say it keeps most for its cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ..layers import Matrix
from .rules import largest_rank


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A matrix that competes for a budget."""

    matrix: Matrix
    spectrum: Tensor
    cost_per_weight: float  # 1 for parameters, positions for MACs, bytes an element for bytes


def allocate(
    candidates: Sequence[Candidate], budget: float, multiple: int, min_saving: float, spare: float = 0.0
) -> list[int | None]:
    """Ranks (None: stays dense) whose cost is below `budget`, by no more than `spare` where the steps allow.

    Greedy: the next step goes to the matrix that gains most relative energy σ²/‖W‖² for its cost. Singular
    values fall, so for one matrix the steps come in the right order by themselves. Where too much is left
    over, a step or two are taken back for others that fill the budget better, if that costs little energy.
    """
    tops = [largest_rank(c.matrix, min_saving) // multiple * multiple for c in candidates]
    kept = []
    for c in candidates:
        squares = c.spectrum.double().square()
        sums = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
        kept.append((sums / sums[-1].clamp_min(torch.finfo(torch.float64).tiny)).tolist())

    def cost(i: int, rank: int | None) -> float:
        c = candidates[i]
        return c.cost_per_weight * (c.matrix.numel if rank is None else c.matrix.factor_numel(rank))

    def energy(i: int, rank: int | None) -> float:
        return 1.0 if rank is None else kept[i][rank]

    def spend(
        ranks: list[int | None], left: float, frozen: tuple[int, ...] = ()
    ) -> tuple[float, list[int | None]]:
        ranks = list(ranks)

        def step(i: int) -> tuple[float, int, int | None] | None:
            """(−gain per cost, matrix, next rank), or None when it is dense already."""
            now = ranks[i]
            if now is None or i in frozen:
                return None
            after = now + multiple if now < tops[i] else None
            gain = energy(i, after) - energy(i, now)
            return -gain / max(cost(i, after) - cost(i, now), 1e-300), i, after

        steps = [s for i in range(len(candidates)) if (s := step(i))]
        heapq.heapify(steps)
        while steps:
            _, i, after = heapq.heappop(steps)
            extra = cost(i, after) - cost(i, ranks[i])
            if extra > left:
                continue  # this matrix is done; a cheaper step of another may still fit
            left -= extra
            ranks[i] = after
            if following := step(i):
                heapq.heappush(steps, following)
        return left, ranks

    def otherwise(
        ranks: list[int | None], left: float, matrices: tuple[int, ...]
    ) -> tuple[float, list[int | None]]:
        """Without the last step of some matrices, what it cost spent on the others."""
        before = list(ranks)
        for i in matrices:
            before[i] = tops[i] if (now := ranks[i]) is None else now - multiple
            left += cost(i, ranks[i]) - cost(i, before[i])
        return spend(before, left, frozen=matrices)

    ranks: list[int | None] = [multiple if top else None for top in tops]
    left = budget - sum(cost(i, rank) for i, rank in enumerate(ranks))
    if left < 0:
        raise ValueError(
            f"the budget is too small: at rank {multiple} everywhere the factorized layers are "
            f"{-left:,.0f} above what it leaves them; raise it, or lower `multiple`"
        )
    left, ranks = spend(ranks, left)

    def total(ranks: list[int | None]) -> float:
        return sum(energy(i, rank) for i, rank in enumerate(ranks))

    at_once = 1
    while left > spare and at_once <= (2 if len(candidates) <= 40 else 1):  # many matrices need no pairs
        movable = [i for i, top in enumerate(tops) if top and ranks[i] != multiple]
        tried = (otherwise(ranks, left, some) for some in combinations(movable, at_once))
        fuller = [(less <= spare, total(new), less, new) for less, new in tried if less < left]
        best = max(fuller, key=lambda x: x[:2], default=None)
        if best is not None and best[1] > 0.95 * total(ranks):
            *_, left, ranks = best
        else:
            at_once += 1
    return ranks
