"""`TunedRate`: a learning rate chosen by validation score, from the same grid and by the same rule for every method."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

#: Ratio of neighbouring rates.
FACTOR = 2.0


def rate_grid(lr: float, count: int) -> list[float]:
    """`count` learning rates around `lr`, a factor of 2 apart.

    >>> rate_grid(0.1, 5), rate_grid(0.1, 2), rate_grid(0.1, 0)
    ([0.025, 0.05, 0.1, 0.2, 0.4], [0.1, 0.2], [])
    """
    return [lr * FACTOR**k for k in range(-((count - 1) // 2), count // 2 + 1)] if count else []


def inner_rates(grid: list[float]) -> list[float]:
    """The rates of a grid that are always tried: all but the two outermost; of at most three rates, all.

    >>> inner_rates([1, 2, 4, 8, 16]), inner_rates([1, 2, 4])
    ([2, 4, 8], [1, 2, 4])
    """
    return grid[1:-1] if len(grid) > 3 else grid


def untried_rates(
    grid: list[float], scores: Mapping[float, float | None], higher_is_better: bool
) -> Collection[float]:
    """The rates that must still be tried: the inner ones, then an outermost one if the best rate is its neighbour.

    So the best rate has worse neighbours, or is an end of the grid. If no inner rate has a finite score, the lowest rate is
    tried.

    >>> untried_rates([1, 2, 4, 8], {2: 90.0}, True), untried_rates([1, 2, 4, 8], {2: 90.0, 4: 91.0}, True)
    ([4], [8])
    >>> untried_rates([1, 2, 4, 8, 16], {2: 90.0, 4: 91.0, 8: None}, True)
    []
    """
    missing = [lr for lr in inner_rates(grid) if lr not in scores]
    if missing or not grid:
        return missing
    best = best_rate(scores, higher_is_better, grid[(len(grid) - 1) // 2])
    place = grid.index(best.lr) if best is not None else 0
    return [lr for lr in grid[max(place - 1, 0) : place + 2] if lr not in scores]


@dataclass(frozen=True)
class TunedRate:
    """The learning rate of a method, and the validation scores it was chosen by."""

    lr: float
    scores: Mapping[float, float | None]  # by learning rate; None: no finite score

    @property
    def edge(self) -> str:
        """ "lowest" or "highest" if the rate is at an end of the grid, so that a better one may lie beyond it.

        >>> TunedRate(0.1, {0.1: 93.0, 0.2: 92.0, 0.4: None}).edge
        'lowest'
        """
        rates = sorted(self.scores)
        if len(rates) < 2 or self.lr not in (rates[0], rates[-1]):
            return ""
        return "lowest" if self.lr == rates[0] else "highest"


def best_rate(
    scores: Mapping[float, float | None], higher_is_better: bool, default: float
) -> TunedRate | None:
    """The rate with the best score, of equal scores the one closest to `default`; None without finite scores.

    >>> best_rate({0.1: 90.0, 0.2: 90.0, 0.4: None}, True, 0.2).lr
    0.2
    """
    finite = {lr: score for lr, score in scores.items() if score is not None and math.isfinite(score)}

    def key(lr: float) -> tuple[float, float]:
        return -finite[lr] if higher_is_better else finite[lr], abs(math.log(lr / default))

    return TunedRate(min(finite, key=key), dict(scores)) if finite else None
