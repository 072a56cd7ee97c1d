"""`BenchRun`: one run of a bench in a folder of its own; and which runs a bench has."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...planning.json_file import read_json
from ..method_name import bench_method
from ..tasks import Recipe
from .bench_settings import BenchSettings
from .tuned_rate import inner_rates, rate_grid

#: Seed of the tuning runs, different from those of the reported runs.
TUNE_SEED = 1_000_000


@dataclass(frozen=True)
class BenchRun:
    """A run of a method: with a seed, or with a learning rate to try.

    >>> BenchRun("powersgd-4", seed=2).name, BenchRun("dense", lr=0.015).name
    ('runs/powersgd-4/seed-2', 'tune/dense/lr-0.015')
    """

    method: str
    seed: int = TUNE_SEED
    lr: float | None = None  # of a tuning run; None: the chosen learning rate

    @property
    def name(self) -> str:
        """Its folder, relative to the bench folder."""
        if self.lr is not None:
            return f"tune/{slug(self.method)}/lr-{self.lr:.4g}"
        return f"runs/{slug(self.method)}/seed-{self.seed}"


def bench_runs(settings: BenchSettings, recipe: Recipe) -> Iterator[BenchRun]:
    """All runs of a bench in order: the tuning runs, then all methods with the first seed, the second, …

    Of the tuning runs, the outermost rates come last, and may not be needed. An interrupted bench is complete for fewer seeds.
    """
    for method in settings.methods:
        grid = rate_grid(bench_method(method).recipe(recipe).lr, settings.tune)
        inner = inner_rates(grid)
        rates = [*inner, *(lr for lr in grid if lr not in inner)]
        yield from (BenchRun(method, lr=lr) for lr in rates)
    for seed in range(settings.seeds):
        yield from (BenchRun(method, seed) for method in settings.methods)


def is_finished(folder: Path) -> bool:
    """Whether the folder holds a finished run."""
    try:
        return read_json(folder / "run.json")["finished"] is not None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def slug(method: str) -> str:
    """The name of a method as a folder name.

    >>> slug("auto+powersgd-4"), slug("my/file.py:Mine(2)")
    ('auto+powersgd-4', 'file.py_Mine_2-...')
    """
    plain = re.sub(r"[^\w.+=@-]+", "_", method.rsplit("/", 1)[-1]).strip("_.")
    return plain if plain == method else f"{plain}-{hashlib.sha256(method.encode()).hexdigest()[:6]}"
