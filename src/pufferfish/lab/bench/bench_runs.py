"""`BenchRun`: one run of a bench in a folder of its own; which runs a bench has, and which of them a shard does."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...planning.json_file import read_json
from ..tasks import Recipe
from .bench_method import bench_method
from .bench_settings import REFERENCES, BenchSettings
from .tuned_rate import inner_rates, rate_grid

#: Seed of the tuning runs, different from those of the reported runs.
TUNE_SEED = 1_000_000


@dataclass(frozen=True)
class BenchRun:
    """A run of a method: with a seed, with as much time or as many bytes as the dense run, or with a learning rate to try.

    >>> BenchRun("powersgd-4", seed=2).name, BenchRun("dense", lr=0.015).name
    ('runs/powersgd-4/seed-2', 'tune/dense/lr-0.015')
    >>> BenchRun("powersgd-4", seed=2, equal="time").name
    'equal-time/powersgd-4/seed-2'
    """

    method: str
    seed: int = TUNE_SEED
    lr: float | None = None  # of a tuning run; None: the chosen learning rate
    equal: str = "steps"

    @property
    def name(self) -> str:
        """Its folder, relative to the bench folder."""
        if self.lr is not None:
            return f"tune/{slug(self.method)}/lr-{self.lr:.4g}"
        kind = "runs" if self.equal == "steps" else f"equal-{self.equal}"
        return f"{kind}/{slug(self.method)}/seed-{self.seed}"


def bench_runs(settings: BenchSettings, recipe: Recipe) -> Iterator[BenchRun]:
    """All runs of a bench in order: the tuning runs, then all methods with the first seed, the second, …

    Of the tuning runs, the outermost rates come last, and may not be needed. At equal time or bytes, each seed again, without
    the dense run, which would be the same. So an interrupted bench is complete for fewer seeds.
    """
    for method in settings.methods:
        grid = rate_grid(bench_method(method).recipe(recipe).lr, settings.tune)
        inner = inner_rates(grid)
        rates = [*inner, *(lr for lr in grid if lr not in inner)]
        yield from (BenchRun(method, lr=lr) for lr in rates)
    others = [method for method in settings.methods if method != REFERENCES[0]]
    for seed in range(settings.seeds):
        yield from (BenchRun(method, seed) for method in settings.methods)
        if settings.equal != "steps":
            yield from (BenchRun(method, seed, equal=settings.equal) for method in others)


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


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of the work, numbered from 1. Shards never wait for each other.

    With tuning, or at equal time or bytes, a shard does all runs of a method, since the seeds share the tuned learning
    rate and the number of updates; otherwise it does every `count`-th run.

    >>> settings = BenchSettings(task="digits", methods=("pufferfish",), seeds=2, hosts=2)
    >>> [run.name for run in bench_runs(settings, settings.resolve()[1]) if Shard.parse("2/3").has_run(run, settings)]
    ['runs/bf16/seed-0', 'runs/bf16/seed-1']
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `NUMBER/COUNT`."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            n = match[2] if match and int(match[2]) else "4"
            raise ValueError(f"--shard {text}: expected 1/{n} to {n}/{n}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def has_run(self, run: BenchRun, settings: BenchSettings) -> bool:
        """Whether a run belongs to this shard."""
        position = settings.methods.index(run.method)
        if not settings.tune and settings.equal == "steps":
            position += run.seed * len(settings.methods)
        return position % self.count == self.number - 1

    def has_timing(self, method: str, settings: BenchSettings) -> bool:
        """Whether this shard times the steps of a method; all shards time the references too."""
        return settings.methods.index(method) % self.count == self.number - 1
