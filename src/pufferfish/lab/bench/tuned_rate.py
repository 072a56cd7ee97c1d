"""The learning rate that a method's runs take: of those it tried, the one with the best validation score."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from ...measure import read
from ..tasks.task import Recipe, Task
from .bench_settings import Asked
from .cells import Cell, finished
from .entry import entry
from .learning_rates import Rate, best, grid


def rate_of(
    method: str, asked: Asked, root: Path, task: Task, recipe: Recipe, failed: Iterable[str] = ()
) -> Rate | None:
    """The recipe's without tuning; None while trials are missing that did not fail, or when all failed."""
    recipe = entry(method).recipe(recipe)
    if not asked.tune:
        return Rate(recipe.lr, {})
    scores: dict[float, float | None] = {}
    for lr in grid(recipe.lr, asked.tune):
        cell = Cell(method, lr=lr).name
        if finished(root / cell):
            scores[lr] = _score(root / cell, task.measure)
        elif cell in failed:
            scores[lr] = None
        else:
            return None
    return best(scores, task.higher, recipe.lr)


def rates_of(asked: Asked, root: Path, task: Task, recipe: Recipe) -> dict[str, Rate]:
    """Of the methods that have tried all theirs."""
    found = {method: rate_of(method, asked, root, task, recipe) for method in asked.methods}
    return {method: rate for method, rate in found.items() if rate is not None}


def _score(folder: Path, measure: str) -> float | None:
    """The last one on validation data; None where it is no number."""
    rows = read(folder).metrics.get(f"valid/{measure}", [])
    return rows[-1][2] if rows and math.isfinite(rows[-1][2]) else None
