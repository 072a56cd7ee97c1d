"""`choose_rate`: the learning rate of a method's runs, from its tuning runs; `untried_runs`: those that are missing."""

import math
from collections.abc import Iterable
from pathlib import Path

from ...measure import read_run
from ..method_name import bench_method
from ..tasks import Recipe, Task
from .bench_runs import BenchRun, is_finished
from .bench_settings import BenchSettings
from .tuned_rate import TunedRate, best_rate, rate_grid, untried_rates


def choose_rate(
    method: str, settings: BenchSettings, root: Path, task: Task, recipe: Recipe, failed: Iterable[str] = ()
) -> TunedRate | None:
    """The rate with the best validation score; without tuning, the recipe's rate.

    Returns None while tuning runs are still to be done, or if all of them failed.
    """
    recipe = bench_method(method).recipe(recipe)
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
    recipe = bench_method(method).recipe(recipe)
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
