"""Learning rates: the same number of trials for every method, chosen on validation data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: From one rate to the next.
FACTOR = 2.0


def grid(lr: float, count: int) -> list[float]:
    """So many rates around `lr`, a factor of 2 apart.

    >>> grid(0.1, 5), grid(0.1, 2), grid(0.1, 0)
    ([0.025, 0.05, 0.1, 0.2, 0.4], [0.1, 0.2], [])
    """
    return [lr * FACTOR**k for k in range(-((count - 1) // 2), count // 2 + 1)] if count else []


@dataclass(frozen=True)
class Rate:
    """The rate that a method runs with, and what it was chosen by."""

    lr: float
    scores: Mapping[float, float | None]  # of validation; None: no number came of it

    @property
    def edge(self) -> str:
        """ "lowest" or "highest" when the best of the grid lies at its end, where a better one may lie beyond.

        >>> Rate(0.1, {0.1: 93.0, 0.2: 92.0, 0.4: None}).edge
        'lowest'
        """
        tried = sorted(self.scores)
        if len(tried) < 2 or self.lr not in (tried[0], tried[-1]):
            return ""
        return "lowest" if self.lr == tried[0] else "highest"


def best(scores: Mapping[float, float | None], higher: bool, middle: float) -> Rate | None:
    """The rate with the best score, of equal ones that nearest to `middle`; None where none has a score.

    >>> best({0.1: 90.0, 0.2: 90.0, 0.4: None}, True, 0.2).lr
    0.2
    """

    def order(lr: float) -> tuple[float, float]:
        score = scores[lr]
        assert score is not None
        return -score if higher else score, abs(math.log(lr / middle))

    there = [lr for lr, score in scores.items() if score is not None and math.isfinite(score)]
    return Rate(min(there, key=order), dict(scores)) if there else None
