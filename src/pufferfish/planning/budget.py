"""`allocate`: share a budget among matrices so that the ranks keep the most energy for their cost."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ..layers import Matrix
from .plan import Plan
from .rules import Budget, largest_rank

Ranks = list[int | None]  # None: the matrix stays dense


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A matrix that takes part in sharing out a budget."""

    matrix: Matrix
    spectrum: Tensor  # singular values, largest first
    cost_per_weight: float  # 1 for parameters, positions for MACs, bytes per element for bytes


def allocate(
    candidates: Sequence[Candidate], budget: float, multiple: int, min_saving: float, spare: float = 0.0
) -> Ranks:
    """Choose ranks whose total cost stays below a budget.

    Greedy: the next step of `multiple` ranks goes to the matrix that gains most relative energy σ²/‖W‖² for
    its cost. Singular values are sorted, so the steps of one matrix come in the right order. If more than
    `spare` is left, one or two steps are exchanged for others that fill the budget better, if that costs
    little energy.

    Args:
        budget: Largest total cost, in units of `cost_per_weight`.
        min_saving: Share of its weights that a factorized matrix must save.
        spare: Part of the budget that may stay unused.
    """
    tops = [largest_rank(c.matrix, min_saving) // multiple * multiple for c in candidates]
    cumulative = []  # relative energy of the first r singular values
    for c in candidates:
        squares = c.spectrum.double().square()
        sums = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
        cumulative.append((sums / sums[-1].clamp_min(torch.finfo(torch.float64).tiny)).tolist())

    def cost(i: int, rank: int | None) -> float:
        c = candidates[i]
        return c.cost_per_weight * (c.matrix.numel if rank is None else c.matrix.factor_numel(rank))

    def energy(i: int, rank: int | None) -> float:
        return 1.0 if rank is None else cumulative[i][rank]

    def spend(ranks: Ranks, left: float, frozen: tuple[int, ...] = ()) -> tuple[float, Ranks]:
        """Spend the remaining budget `left` in steps; the ranks of `frozen` matrices do not change."""
        ranks = list(ranks)

        def step(i: int) -> tuple[float, int, int | None] | None:
            """Next step of a matrix: (−gain per cost, matrix, next rank), or None if it is dense already."""
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
                continue  # a cheaper step of another matrix may still fit
            left -= extra
            ranks[i] = after
            if following := step(i):
                heapq.heappush(steps, following)
        return left, ranks

    def exchange(ranks: Ranks, left: float, matrices: tuple[int, ...]) -> tuple[float, Ranks]:
        """Take back the last step of some matrices and spend its cost on the others."""
        lowered = list(ranks)
        for i in matrices:
            lowered[i] = tops[i] if (now := ranks[i]) is None else now - multiple
            left += cost(i, ranks[i]) - cost(i, lowered[i])
        return spend(lowered, left, frozen=matrices)

    ranks: Ranks = [multiple if top else None for top in tops]
    left = budget - sum(cost(i, rank) for i, rank in enumerate(ranks))
    if left < 0:
        raise ValueError(
            f"the budget is too small: at rank {multiple} everywhere the factorized layers exceed their share by "
            f"{-left:,.0f}; raise the budget, or lower `multiple`"
        )
    left, ranks = spend(ranks, left)

    def total_energy(ranks: Ranks) -> float:
        return sum(energy(i, rank) for i, rank in enumerate(ranks))

    count = 1
    while left > spare and count <= (2 if len(candidates) <= 40 else 1):  # many matrices need no pairs
        movable = [i for i, top in enumerate(tops) if top and ranks[i] != multiple]
        exchanges = (exchange(ranks, left, matrices) for matrices in combinations(movable, count))
        fuller = [(rest <= spare, total_energy(new), rest, new) for rest, new in exchanges if rest < left]
        best = max(fuller, key=lambda x: x[:2], default=None)
        if best is not None and best[1] > 0.95 * total_energy(ranks):
            *_, left, ranks = best
        else:
            count += 1
    return ranks


def apply_budget(plan: Plan, budget: Budget, spectra: Mapping[str, Tensor]) -> Plan:
    """Replace the budget rule by ranks, shared out among the entries that have it."""
    chosen = [e for e in plan.entries if e.rule == budget]
    after = plan.after
    amounts = {"params": after.parameters, "bytes": after.gradient_bytes, "macs": after.forward_macs}
    total = amounts[budget.unit]
    assert total is not None
    if budget.amount >= total:
        met = "the budget is met without it"
        return plan.replace(e.keep_dense(met) if e in chosen else e for e in plan.entries)
    candidates = []
    for e in chosen:
        assert e.matrix is not None
        macs = (e.positions or 0) * e.matrix.used_blocks / e.matrix.blocks
        costs = {"params": 1, "bytes": e.itemsize * e.trainable, "macs": macs}
        cost = costs[budget.unit]
        candidates.append(Candidate(matrix=e.matrix, spectrum=spectra[e.name], cost_per_weight=cost))
    rest = total - sum(c.cost_per_weight * c.matrix.numel for c in candidates)
    spare = 0.01 * budget.amount
    ranks = allocate(candidates, budget.amount - rest, plan.multiple, plan.min_saving, spare)
    by_name = dict(zip((e.name for e in chosen), ranks, strict=True))
    entries = []
    for e in plan.entries:
        if e.name not in by_name:
            entries.append(e)
        elif (r := by_name[e.name]) is not None:
            entries.append(e.with_rank(r))
        else:
            entries.append(e.keep_dense("the budget is best spent on leaving it dense"))
    return plan.replace(entries)
