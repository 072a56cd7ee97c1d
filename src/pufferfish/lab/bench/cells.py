"""`Cell`: one run of a bench, in a folder of its own. Which there are, in which order, and who runs them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..tasks.task import Recipe
from .bench_settings import Asked
from .entry import entry
from .learning_rates import grid

#: Of the runs that choose a learning rate: none of those that count.
TUNE_SEED = 1_000_000


@dataclass(frozen=True)
class Cell:
    """A method with a learning rate to try, or with a seed.

    >>> Cell("powersgd-4", seed=2).name, Cell("dense", lr=0.015).name
    ('runs/powersgd-4/seed-2', 'tune/dense/lr-0.015')
    """

    method: str
    seed: int = TUNE_SEED
    lr: float | None = None  # to try; None: the chosen one

    @property
    def name(self) -> str:
        """Where it is in the bench's folder."""
        if self.lr is not None:
            return f"tune/{slug(self.method)}/lr-{self.lr:.4g}"
        return f"runs/{slug(self.method)}/seed-{self.seed}"


def cells(asked: Asked, recipe: Recipe) -> Iterator[Cell]:
    """All of a bench: first those that choose a rate around the recipe's, then seed after seed."""
    for method in asked.methods:
        lr = entry(method).recipe(recipe).lr
        yield from (Cell(method, lr=rate) for rate in grid(lr, asked.tune))
    for seed in range(asked.seeds):
        yield from (Cell(method, seed) for method in asked.methods)


def finished(folder: Path) -> bool:
    """Whether a run came to its end there."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8"))["finished"] is not None
    except (OSError, ValueError, KeyError):
        return False


def slug(method: str) -> str:
    """A method's name as a folder's.

    >>> slug("auto+powersgd-4"), slug("my/file.py:Mine(2)")
    ('auto+powersgd-4', 'file.py_Mine_2-...')
    """
    plain = re.sub(r"[^\w.+=@-]+", "_", method.rsplit("/", 1)[-1]).strip("_.")
    return plain if plain == method else f"{plain}-{hashlib.sha256(method.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class Shard:
    """A member's part of the work.

    A method's learning rates are compared before its seeds run, so with tuning a member takes whole methods; else
    every n-th run. No member ever waits for another.

    >>> asked = Asked(task="digits", methods=("pufferfish",), seeds=2, hosts=2)
    >>> [cell.name for cell in cells(asked, asked.found()[1]) if Shard.parse("2/3").takes(cell, asked)]
    ['runs/bf16/seed-0', 'runs/bf16/seed-1']
    """

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From `i/n`, counted from 1."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            n = match[2] if match and int(match[2]) else "4"
            raise ValueError(f"--shard {text}: write 1/{n} to {n}/{n}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def takes(self, cell: Cell, asked: Asked) -> bool:
        """Whether a run is its."""
        place = asked.methods.index(cell.method)
        if not asked.tune:
            place += cell.seed * len(asked.methods)
        return place % self.of == self.number - 1

    def times(self, method: str, asked: Asked) -> bool:
        """Whether it times a method's steps; those of the references everybody does."""
        return asked.methods.index(method) % self.of == self.number - 1
