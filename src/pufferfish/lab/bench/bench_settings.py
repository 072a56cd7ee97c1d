"""`Asked`: what a bench is told, and `bench.json`, which keeps it: a folder never mixes what cannot be compared."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..network import Shape
from ..report import write
from ..tasks.find import find
from ..tasks.task import Recipe, Task
from .entry import entry

FILE = "bench.json"
VERSION = 1
#: In every bench of several workers: what the others are compared with. One worker sends nothing, so the first will do.
ALWAYS = ("dense", "bf16")
#: They may grow from call to call; all else changes what a cell means.
_GROW = ("methods", "seeds", "rounds")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be compared, and where.

    Args:
        task: as in `pufferfish train`.
        methods: ways to train, as `entry` reads them; dense is always in, and bf16 where several workers exchange.
        seeds: 0, 1 … below it.
        recipe, epochs, batch: the task's recipe, and what stands in place of its numbers.
        tune: learning rates that every method tries; 0: all take the recipe's.
        hosts, per_host, network: the workers, and the link between hosts; None: this machine's loopback.
        rounds: in which all methods' steps are timed in turns.
        simulate: all workers in one process, exactly; times are then predicted.
        device, precision, graph: as in `pufferfish train`.

    >>> Asked(task="digits", methods=("pufferfish",), hosts=4).methods
    ('dense', 'bf16', 'pufferfish')
    >>> Asked(task="digits", methods=(), seeds=0)
    Traceback (most recent call last):
    ValueError: --seeds 0: take 1 or more
    """

    task: str
    methods: tuple[str, ...]
    seeds: int = 1
    recipe: str = "short"
    epochs: int | None = None
    batch: int | None = None
    tune: int = 0
    hosts: int = 1
    per_host: int = 1
    network: str | None = None
    rounds: int = 5
    simulate: bool = False
    device: str = "cpu"
    precision: str = "fp32"
    graph: bool = False

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "batch", "hosts", "per_host", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: take 1 or more")
        if self.tune < 0 or self.tune == 1:
            raise ValueError(f"--tune lr={self.tune}: take 2 or more rates, such as lr=5")
        if self.network is not None:
            shape = Shape.parse(self.network)
            if not self.simulate:
                shape.check()
                if self.hosts < 2:
                    raise ValueError(
                        f"--network {self.network}: one host has no link; take --hosts 2 or more"
                    )
        object.__setattr__(self, "methods", tuple(dict.fromkeys([*self.references, *self.methods])))

    @property
    def workers(self) -> int:
        """Of the whole job."""
        return self.hosts * self.per_host

    @property
    def references(self) -> tuple[str, ...]:
        """What the others are compared with."""
        return ALWAYS if self.workers > 1 else ALWAYS[:1]

    @property
    def timed(self) -> bool:
        """Whether steps are timed in rounds: not those of simulated workers, nor in a CUDA graph, which a run records."""
        return not self.simulate and not self.graph

    def found(self) -> tuple[Task, Recipe]:
        """The task and the numbers; refuses what does not fit together before anything runs."""
        entries = [entry(method) for method in self.methods]
        task = find(self.task)
        recipe = task.recipe(self.recipe).changed(epochs=self.epochs, batch=self.batch)
        for one in entries:
            one.recipe(recipe)
        if recipe.batch % self.workers:
            raise ValueError(
                f"a batch of {recipe.batch} does not go to {self.workers} workers in equal parts; change --batch"
            )
        if self.tune and getattr(task, "held", None) == 0:
            raise ValueError(
                f"--tune: {self.task} holds no validation data out to choose by; take held= above 0"
            )
        return task, recipe

    def with_earlier(self, folder: Path) -> Asked:
        """This and what the folder was asked for before; refused where that means something else."""
        if not (folder / FILE).exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"{folder}: it is not empty and no bench's folder; choose another for --out")
            return self
        old = load(folder)
        differing = [
            f"{f.name.replace('_', '-')} was {getattr(old, f.name)!r}, now {getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.name not in _GROW and getattr(old, f.name) != getattr(self, f.name)
        ]
        if differing:
            raise ValueError(
                f"{folder} holds a bench with other settings: {'; '.join(differing)}. Choose another folder"
            )
        return dataclasses.replace(
            self,
            methods=(*old.methods, *self.methods),
            seeds=max(old.seeds, self.seeds),
            rounds=max(old.rounds, self.rounds),
        )

    def save(self, folder: Path, **more: Any) -> None:
        """As bench.json, with what was found out."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, {"pufferfish_bench": VERSION, **dataclasses.asdict(self), **more})


def load(folder: Path) -> Asked:
    """What a folder's bench.json says.

    >>> load(Path("/nowhere"))
    Traceback (most recent call last):
    ValueError: /nowhere/bench.json: there is no such file; this is not the folder of a bench
    """
    path = folder / FILE
    data = read_json(path, "this is not the folder of a bench")
    if data.get("pufferfish_bench") != VERSION:
        raise ValueError(f"{path}: this is no bench of version {VERSION}, the one that this pufferfish knows")
    names = {f.name for f in dataclasses.fields(Asked)}
    missing = names - data.keys()
    if missing:
        raise ValueError(f"{path}: it lacks {', '.join(sorted(missing))}")
    return Asked(**{name: data[name] for name in names} | {"methods": tuple(data["methods"])})


def split(text: str) -> tuple[str, ...]:
    """Methods between commas; those inside of brackets do not count.

    >>> split("dense, topk-0.01,file.py:Mine(rank=2, on=[1,2])")
    ('dense', 'topk-0.01', 'file.py:Mine(rank=2, on=[1,2])')
    """
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return tuple(name for part in found if (name := part.strip()))


def trials(text: str) -> int:
    """How many learning rates `--tune` asks for.

    >>> trials("lr=5")
    5
    """
    match = re.fullmatch(r"lr=([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"--tune {text}: write lr=5 for five learning rates")
    return int(match[1])


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """A JSON object from a file; the error names it, and says what its absence means."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; {otherwise}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: this is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: this is a {type(data).__name__}, not what a bench writes")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(json.dumps(data, indent=1) + "\n", path)
