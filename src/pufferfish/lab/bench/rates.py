"""The learning rate of each method of a bench, from tuning runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...measure import read_run
from ..method_name import training_method
from ..tasks import Recipe, Task
from .bench_settings import BenchRun, BenchSettings, is_finished


def choose_rate(
    method: str, settings: BenchSettings, root: Path, task: Task, recipe: Recipe, failed: Iterable[str] = ()
) -> TunedRate | None:
    """The rate with the best validation score; without tuning, the recipe's rate.

    Returns None while tuning runs are still to be done, or if all of them failed.
    """
    recipe = training_method(method).recipe(recipe)
    if not settings.tune:
        return TunedRate(recipe.lr, {})
    scores = _scores(method, settings, root, task, recipe, failed)
    if untried_rates(rate_grid(recipe.lr, settings.tune), scores, task.higher_is_better):
        return None
    return best_rate(scores, task.higher_is_better, recipe.lr)


def untried_runs(
    method: str, settings: BenchSettings, root: Path, task: Task, recipe: Recipe, failed: Iterable[str] = ()
) -> list[BenchRun]:
    """The tuning runs that can be started now; further ones may follow from their scores."""
    recipe = training_method(method).recipe(recipe)
    scores = _scores(method, settings, root, task, recipe, failed)
    rates = untried_rates(rate_grid(recipe.lr, settings.tune), scores, task.higher_is_better)
    return [BenchRun(method, lr=lr) for lr in rates]


def _scores(
    method: str, settings: BenchSettings, root: Path, task: Task, recipe: Recipe, failed: Iterable[str]
) -> dict[float, float | None]:
    """The validation scores of the rates that were tried; None: the run failed, or its score is not finite."""
    scores: dict[float, float | None] = {}
    for lr in rate_grid(recipe.lr, settings.tune):
        run = BenchRun(method, lr=lr).name
        if is_finished(root / run):
            rows = read_run(root / run).metrics.get(f"valid/{task.metric}", [])
            scores[lr] = rows[-1][2] if rows and math.isfinite(rows[-1][2]) else None
        elif run in failed:
            scores[lr] = None
    return scores


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


def bench_runs(settings: BenchSettings, recipe: Recipe) -> Iterator[BenchRun]:
    """All runs of a bench in order: the tuning runs, then all methods with the first seed, the second, …

    Of the tuning runs, the outermost rates come last, and may not be needed. An interrupted bench is complete for fewer seeds.
    """
    for method in settings.methods:
        grid = rate_grid(training_method(method).recipe(recipe).lr, settings.tune)
        inner = inner_rates(grid)
        rates = [*inner, *(lr for lr in grid if lr not in inner)]
        yield from (BenchRun(method, lr=lr) for lr in rates)
    for seed in range(settings.seeds):
        yield from (BenchRun(method, seed) for method in settings.methods)
