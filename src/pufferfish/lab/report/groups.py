"""Runs sorted: what may be compared at all, which runs are one method's, and what they are compared with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...measure import Run, read
from .bench_folder import CEILING, tries, with_rounds

MEASURES = ("accuracy", "bleu", "perplexity", "loss")
#: What the others are compared with, where nobody says: the first that is there.
REFERENCES = ("bf16", "dense")


@dataclass(frozen=True)
class Measure:
    """The figure that says how good a model is."""

    name: str
    higher: bool
    scale: float = 1.0  # 100: kept as a share, shown in per cent

    @property
    def label(self) -> str:
        return f"{self.name}, %" if self.name == "accuracy" else self.name

    @property
    def places(self) -> int:
        return 4 if self.name == "loss" else 2


@dataclass(frozen=True)
class Group:
    """The runs of one method: the same but for the seed."""

    name: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    def results(self, key: str) -> dict[int, float]:
        """By seed, of the runs that came to their end."""
        return {
            seed_of(run): float(run.results[key]) for run in self.finished if is_number(run.results.get(key))
        }

    def predictions(self, key: str) -> dict[int, float]:
        return {
            seed_of(run): float(run.predicted[key]) for run in self.runs if is_number(run.predicted.get(key))
        }

    @property
    def rounds(self) -> dict[str, Any]:
        """Of the bench that timed its steps; empty without."""
        return next((found for run in self.runs if isinstance(found := run.results.get("rounds"), dict)), {})

    def wholes(self) -> dict[int, float]:
        """Seconds of the whole run, by seed."""
        return {seed_of(run): ends(run)[0] for run in self.finished if clocked(run) and ends(run)[0] > 0}

    def steps(self) -> set[int]:
        """Of one training: what trains several times has all of them in its `wholes`, and the first is as long as others'."""
        return {trainings(run)[0]["steps"] if trainings(run) else ends(run)[1] for run in self.finished}


@dataclass(frozen=True)
class Comparison:
    """What ran on the same task, the same number of workers, the same link and the same kind of machine."""

    title: str
    measure: Measure
    groups: tuple[Group, ...]
    reference: Group | None

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]


def find(paths: Iterable[str | Path]) -> list[Run]:
    """The runs in these folders: each a run's own, or one that has such folders below it."""
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path}: there is no such folder")
        below = (p.parent for p in sorted(path.rglob("run.json")))
        found = [path] if (path / "run.json").is_file() else [p for p in below if not tries(p)]
        if not found:
            raise ValueError(f"{path}: no run in it; a run's folder holds run.json and metrics.csv")
        folders |= dict.fromkeys(folder.resolve() for folder in found)
    if not folders:
        raise ValueError("no runs: name the folders of some")
    return with_rounds([read(folder) for folder in folders])


def comparisons(runs: Sequence[Run], against: str | None = None) -> list[Comparison]:
    """Sorted by what may be compared; `against` names the method the others are compared with."""
    kinds: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        kinds.setdefault(_conditions(run), []).append(run)
    if against is not None and against not in {run.name for run in runs}:
        names = ", ".join(dict.fromkeys(run.name for run in runs))
        raise ValueError(f"{against!r} is none of these runs' names: {names}")
    found = []
    for conditions, members in kinds.items():
        by_name: dict[str, dict[int, Run]] = {}
        for run in members:
            seeds = by_name.setdefault(run.name, {})
            if seed_of(run) in seeds and run.name != CEILING:
                raise ValueError(
                    f"{seeds[seed_of(run)].folder} and {run.folder} are both {run.name!r} with seed {run.seed}: "
                    "leave one out, or give one another name or seed"
                )
            seeds[seed_of(run)] = run
        groups = [Group(name, tuple(seeds[s] for s in sorted(seeds))) for name, seeds in by_name.items()]
        groups.sort(key=lambda group: (group.name == CEILING, group.name not in REFERENCES))
        wanted = (against,) if against is not None else REFERENCES
        reference = next((g for name in wanted for g in groups if g.name == name), None)
        title = ", ".join(part for part in conditions if part)
        found.append(Comparison(title, _measure(members), tuple(groups), reference))
    return found


def clocked(run: Run) -> bool:
    """Whether its clock says what training took: not where steps are only predicted, as of simulated workers."""
    said, got = (is_number(x.get("seconds_a_step")) for x in (run.predicted, run.results))
    return got or not said


def seed_of(run: Run) -> int:
    """Its seed; 0 where nobody said which."""
    return run.seed or 0


def layers_of(run: Run) -> list[dict[str, Any]]:
    return [layer for layer in run.layers if isinstance(layer.get("name"), str)]


def ends(run: Run) -> tuple[float, int]:
    """Seconds and steps at the end of a run."""
    rows = [rows[-1] for rows in run.metrics.values() if rows]
    last = max((row[0] for row in rows), default=0.0)
    told = [run.results[key] for key in ("seconds", "training_seconds") if key in run.results]
    seconds = next((float(x) for x in told if is_number(x)), last)
    return seconds, max((row[1] for row in rows), default=0)


def trainings(run: Run) -> list[dict[str, Any]]:
    """Of a method that trains several times to come to its model: each one's; else none."""
    told = run.results.get("trainings")
    return told if isinstance(told, list) else []


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def short(value: Any) -> str:
    """A setting as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _conditions(run: Run) -> tuple[str, ...]:
    workers = f"{run.workers} workers" if run.workers > 1 else "1 worker"
    hosts = f"on {run.hosts} hosts" if run.hosts > 1 else ""
    link = str((run.link or {}).get("asked") or "")
    return (
        str(run.settings.get("task", "")), f"{workers} {hosts}".strip(), link,
        str(run.hardware.get("gpu") or run.hardware.get("cpu") or ""),
    )  # fmt: skip


def _measure(runs: Sequence[Run]) -> Measure:
    named = [run.settings.get("measure") for run in runs]
    seen = {key for run in runs for key in run.results}
    seen |= {key.removeprefix("valid/") for run in runs for key in run.metrics if key.startswith("valid/")}
    name = next((n for n in named if isinstance(n, str)), None) or next(
        (m for m in MEASURES if m in seen), "loss"
    )
    higher = next((h for run in runs if isinstance(h := run.settings.get("higher"), bool)), None)
    values = [float(run.results[name]) for run in runs if is_number(run.results.get(name))]
    values += [
        value for run in runs for _, _, value in run.metrics.get(f"valid/{name}", []) if math.isfinite(value)
    ]
    share = name == "accuracy" and max(values, default=0.0) <= 1
    return Measure(
        name, name not in ("perplexity", "loss") if higher is None else higher, 100.0 if share else 1.0
    )
