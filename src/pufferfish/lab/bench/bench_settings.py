"""The settings of a bench, the runs that it consists of, and the learning rates that they use."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...measure import read_run
from ...planning.json_file import read_json
from ..method_name import slug, training_method
from ..network import LinkShape
from ..report import write
from ..tasks import Recipe, Task, find_task
from ..train import RunSettings

FILE = "bench.json"
VERSION = 1
#: Reference methods, part of every bench. A single worker sends nothing, so it has the first only.
REFERENCES = ("dense", "bf16")
#: Settings that a later call for the same folder may extend; all others must stay the same.
_EXTENSIBLE = ("methods", "seeds", "rounds")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The methods to compare, and where they run.

    Args:
        task: as in `pufferfish train`.
        methods: methods as `training_method` parses them; dense is always added, and bf16 for several workers.
        seeds: number of seeds, from 0.
        recipe, epochs, batch: the task's recipe, and overrides of its values.
        tune: learning rates that every method is tuned with, as `untried_rates` says; 0: all use the recipe's.
        nodes, per_node, network: emulated hosts, workers on each, and the link between hosts; None: the loopback.
        rounds: timed rounds, in which the methods take turns.
        simulate: exact simulation of all workers in one process; step times are predicted.
        device, precision, compile: as in `pufferfish train`.

    >>> BenchSettings(task="digits", methods=("pufferfish",), nodes=4).methods
    ('dense', 'bf16', 'pufferfish')
    >>> BenchSettings(task="digits", methods=(), seeds=0)
    Traceback (most recent call last):
    ValueError: --seeds 0: must be at least 1
    """

    task: str
    methods: tuple[str, ...]
    seeds: int = 1
    recipe: str = "short"
    epochs: int | None = None
    batch: int | None = None
    tune: int = 0
    nodes: int = 1
    per_node: int = 1
    network: str | None = None
    rounds: int = 5
    simulate: bool = False
    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "batch", "nodes", "per_node", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.tune < 0 or self.tune == 1:
            raise ValueError(f"--tune {self.tune}: must be at least 2 learning rates")
        shape = None if self.network is None else LinkShape.parse(self.network)
        if shape is not None and not self.simulate:
            shape.check_emulable()
            if self.nodes < 2:
                reason = "a single machine has no link; pass --nodes 2 or more"
                raise ValueError(f"--network {self.network}: {reason}")
        object.__setattr__(
            self,
            "methods",
            tuple(dict.fromkeys([*self.references, *(training_method(m).name for m in self.methods)])),
        )

    @property
    def workers(self) -> int:
        """Number of workers on all hosts."""
        return self.nodes * self.per_node

    @property
    def references(self) -> tuple[str, ...]:
        """The reference methods."""
        return REFERENCES if self.workers > 1 else REFERENCES[:1]

    @property
    def timed(self) -> bool:
        """Whether steps are timed in rounds, which run eagerly: compiled runs record them."""
        return not self.simulate and not self.compile

    def resolve(self) -> tuple[Task, Recipe]:
        """The task and the recipe; raises ValueError for settings that do not fit together."""
        methods = [training_method(method) for method in self.methods]
        task = find_task(self.task)
        recipe = task.recipe(self.recipe, epochs=self.epochs, batch=self.batch)
        for method in methods:
            method.recipe(recipe)
        if recipe.batch % self.workers:
            raise ValueError(
                f"a batch of {recipe.batch} cannot be split equally over {self.workers} workers; change --batch"
            )
        if self.tune and getattr(task, "held", None) == 0:
            raise ValueError(f"--tune: {self.task} has no validation data; set held= above 0")
        return task, recipe

    def run_settings(self, method: str, recipe: Recipe, folder: Path = Path(), **more: Any) -> RunSettings:
        """The settings of a method's run."""
        if self.simulate:
            more |= {"simulate": self.workers} | ({"network": self.network} if self.network else {})
        return RunSettings(
            training_method(method), recipe, folder, device=self.device, precision=self.precision,
            compile=self.compile, hosts=self.nodes, **more,
        )  # fmt: skip

    def merge_saved(self, folder: Path) -> BenchSettings:
        """These settings and those saved in the folder; raises ValueError if their results cannot be compared."""
        if not (folder / FILE).exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"{folder}: not empty, and not the folder of a bench; choose another --out")
            return self
        saved = load_settings(folder)
        differences = [
            f"{f.name.replace('_', '-')} was {getattr(saved, f.name)!r}, now {getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.name not in _EXTENSIBLE and getattr(saved, f.name) != getattr(self, f.name)
        ]
        if differences:
            changes = "; ".join(differences)
            raise ValueError(f"{folder} holds a bench with other settings: {changes}. Choose another folder")
        methods = (*saved.methods, *self.methods)
        seeds, rounds = max(saved.seeds, self.seeds), max(saved.rounds, self.rounds)
        return dataclasses.replace(self, methods=methods, seeds=seeds, rounds=rounds)

    def save(self, folder: Path, **results: Any) -> None:
        """Write bench.json, with results such as the tuned learning rates."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, {"pufferfish_bench": VERSION, **dataclasses.asdict(self), **results})


def load_settings(folder: Path) -> BenchSettings:
    """Read the settings in a folder's bench.json."""
    path = folder / FILE
    data = read_json(path)
    if data.get("pufferfish_bench") != VERSION:
        raise ValueError(
            f"{path}: not a bench of version {VERSION}, the only one that this version of pufferfish supports"
        )
    names = {f.name for f in dataclasses.fields(BenchSettings)}
    missing = names - data.keys()
    if missing:
        raise ValueError(f"{path}: missing {', '.join(sorted(missing))}")
    return BenchSettings(**{name: data[name] for name in names} | {"methods": tuple(data["methods"])})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object atomically; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(json.dumps(data, indent=1) + "\n", path)


#: Seed of the tuning runs, different from those of the reported runs.
TUNE_SEED = 1_000_000


@dataclass(frozen=True)
class BenchRun:
    """A run of a method: with a seed, or with a learning rate to try.

    >>> BenchRun("powersgd(4)", seed=2).name, BenchRun("dense", lr=0.015).name
    ('runs/powersgd(4)/seed-2', 'tune/dense/lr-0.015')
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


def is_finished(folder: Path) -> bool:
    """Whether the folder holds a finished run."""
    try:
        return read_json(folder / "run.json")["finished"] is not None
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
