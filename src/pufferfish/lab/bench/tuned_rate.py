"""`TunedRate`: a learning rate chosen by validation score, from the same number of trials for every method."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: Ratio of neighbouring rates.
FACTOR = 2.0


def rate_grid(lr: float, count: int) -> list[float]:
    """`count` learning rates around `lr`, a factor of 2 apart.

    >>> rate_grid(0.1, 5), rate_grid(0.1, 2), rate_grid(0.1, 0)
    ([0.025, 0.05, 0.1, 0.2, 0.4], [0.1, 0.2], [])
    """
    return [lr * FACTOR**k for k in range(-((count - 1) // 2), count // 2 + 1)] if count else []


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
