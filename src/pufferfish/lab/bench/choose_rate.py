"""`choose_rate`: the learning rate of a method's runs, from its tuning runs."""

import math
from collections.abc import Iterable
from pathlib import Path

from ...measure import read_run
from ..tasks import Recipe, Task
from .bench_method import bench_method
from .bench_runs import BenchRun, is_finished
from .bench_settings import BenchSettings
from .tuned_rate import TunedRate, best_rate, rate_grid


def choose_rate(
    method: str, settings: BenchSettings, root: Path, task: Task, recipe: Recipe, failed: Iterable[str] = ()
) -> TunedRate | None:
    """The rate with the best validation score; without tuning, the recipe's rate.

    Returns None while tuning runs are still to be done, or if all of them failed.
    """
    recipe = bench_method(method).recipe(recipe)
    if not settings.tune:
        return TunedRate(recipe.lr, {})
    scores: dict[float, float | None] = {}
    for lr in rate_grid(recipe.lr, settings.tune):
        run = BenchRun(method, lr=lr).name
        if is_finished(root / run):
            rows = read_run(root / run).metrics.get(f"valid/{task.metric}", [])
            scores[lr] = rows[-1][2] if rows and math.isfinite(rows[-1][2]) else None
        elif run in failed:
            scores[lr] = None
        else:
            return None
    return best_rate(scores, task.higher_is_better, recipe.lr)
