"""`Comparison`: runs that can be compared with each other, grouped by method."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from ...measure import Run, read_run
from .bench_folder import NO_EXCHANGE, add_timings, is_tuning_run, source_of
from .formatting import metric_places, metric_words

METRICS = ("accuracy", "bleu", "bits_per_byte", "perplexity", "loss")
#: Default references: the first of these names that is among the runs.
REFERENCES = ("bf16", "dense")


@dataclass(frozen=True)
class Metric:
    """The metric that says how good a model is."""

    name: str
    higher: bool  # higher values are better
    scale: float = 1.0  # 100 where a fraction is recorded and per cent are shown

    @property
    def label(self) -> str:
        return f"{self.words}, %" if self.name == "accuracy" else self.words

    @property
    def words(self) -> str:
        return metric_words(self.name)

    @property
    def places(self) -> int:
        return metric_places(self.name)


@dataclass(frozen=True)
class MethodRuns:
    """The runs of one method, which differ in the seed only."""

    name: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    def results(self, key: str) -> dict[int, float]:
        """A result of the finished runs, by seed."""
        results = {seed_of(run): run.results.get(key) for run in self.finished}
        return {seed: float(value) for seed, value in results.items() if is_number(value)}

    def predictions(self, key: str) -> dict[int, float]:
        """A prediction of all runs, by seed."""
        predictions = {seed_of(run): run.predicted.get(key) for run in self.runs}
        return {seed: float(value) for seed, value in predictions.items() if is_number(value)}

    @property
    def rounds(self) -> dict[str, Any]:
        """Statistics of the timed rounds of a bench; empty without."""
        return next((r for run in self.runs if isinstance(r := run.results.get("rounds"), dict)), {})

    def run_seconds(self) -> dict[int, float]:
        """Seconds of the whole run, by seed."""
        seconds = {seed_of(run): length(run)[0] for run in self.finished if has_measured_time(run)}
        return {seed: value for seed, value in seconds.items() if value > 0}

    def steps(self) -> set[int]:
        """Steps of one training. Methods that train several times have the sum of all trainings in `run_seconds`."""
        return {trainings(run)[0]["steps"] if trainings(run) else length(run)[1] for run in self.finished}


@dataclass(frozen=True)
class Comparison:
    """Runs with the same task, number of workers, link and kind of machine."""

    title: str
    metric: Metric
    methods: tuple[MethodRuns, ...]
    reference: MethodRuns | None

    @property
    def runs(self) -> list[Run]:
        return [run for method in self.methods for run in method.runs]


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read the runs in these folders, each the folder of a run or a folder with such folders below it."""
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path}: no such folder")
        below = (p.parent for p in sorted(path.rglob("run.json")))
        runs = [path] if (path / "run.json").is_file() else [p for p in below if not is_tuning_run(p)]
        if not runs:
            raise ValueError(f"{path}: no runs found; the folder of a run contains run.json and metrics.csv")
        folders |= dict.fromkeys(folder.resolve() for folder in runs)
    if not folders:
        raise ValueError("no runs: pass the folder of at least one run")
    return add_timings([read_run(folder) for folder in folders])


def compare_runs(runs: Sequence[Run], against: str | None = None) -> list[Comparison]:
    """Group runs by what can be compared.

    Args:
        runs: as `find_runs` returns them.
        against: name of the reference method; the first of `REFERENCES` by default.
    """
    by_conditions: dict[tuple[str, ...], list[Run]] = {}
    for run in _hide_checksums(runs):
        by_conditions.setdefault(_conditions(run), []).append(run)
    comparisons = []
    for conditions, members in by_conditions.items():
        methods = _methods(members)
        references = REFERENCES if against is None else (against,)
        reference = next((method for name in references for method in methods if method.name == name), None)
        title = ", ".join(part for part in conditions if part)
        comparisons.append(Comparison(title, _metric(members), tuple(methods), reference))
    names = dict.fromkeys(method.name for comparison in comparisons for method in comparison.methods)
    if against is not None and against not in names:
        raise ValueError(f"{against!r} is not the name of a run; the runs are named {', '.join(names)}")
    return comparisons


def has_measured_time(run: Run) -> bool:
    """Whether the time of the run is meaningful: not if its steps are only predicted."""
    predicted, measured = (is_number(x.get("seconds_a_step")) for x in (run.predicted, run.results))
    return measured or not predicted


def seed_of(run: Run) -> int:
    """The seed of a run; 0 if it has none."""
    return run.seed or 0


def recorded_layers(run: Run) -> list[dict[str, Any]]:
    """The records of the layers that have a name."""
    return [layer for layer in run.layers if isinstance(layer.get("name"), str)]


def length(run: Run) -> tuple[float, int]:
    """Length of a run in seconds and in steps."""
    rows = [rows[-1] for rows in run.metrics.values() if rows]
    last = max((row[0] for row in rows), default=0.0)
    recorded = [run.results[key] for key in ("seconds", "training_seconds") if key in run.results]
    seconds = next((float(x) for x in recorded if is_number(x)), last)
    return seconds, max((row[1] for row in rows), default=0)


def trainings(run: Run) -> list[dict[str, Any]]:
    """One record per training, for methods that train several times; empty for others."""
    records = run.results.get("trainings")
    return records if isinstance(records, list) else []


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def as_text(value: Any) -> str:
    """A setting as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hide_checksums(runs: Sequence[Run]) -> list[Run]:
    """Name tasks that are files without the checksum of the text, unless the runs have different texts of a file."""
    names = {task: re.sub(r"@[0-9a-f]{12}$", "", task) for run in runs if (task := _task(run))}
    texts = Counter(names.values())
    hidden = {task: name for task, name in names.items() if texts[name] == 1}
    return [
        replace(run, settings=run.settings | {"task": hidden[task]})
        if (task := _task(run)) in hidden
        else run
        for run in runs
    ]


def _task(run: Run) -> str:
    return str(run.settings.get("task", ""))


def _methods(runs: Sequence[Run]) -> list[MethodRuns]:
    """Group runs by name, and by seed."""
    by_name: dict[str, dict[int, Run]] = {}
    for run in _tell_apart(runs):
        by_name.setdefault(run.name, {})[seed_of(run)] = run
    methods = [MethodRuns(name, tuple(run for _, run in sorted(s.items()))) for name, s in by_name.items()]
    return sorted(methods, key=lambda method: (method.name == NO_EXCHANGE, method.name not in REFERENCES))


def _tell_apart(runs: Sequence[Run]) -> list[Run]:
    """Append the folder to the names of runs whose name and seed another run has too.

    The runs of a bench keep their names if the others are not of a bench: its other methods are compared with them.
    """
    ordered = sorted(runs, key=lambda run: source_of(run) == run.folder)
    first: dict[tuple[str, int], Run] = {}
    for run in ordered:
        first.setdefault((run.name, seed_of(run)), run)
    # All seeds that a bench has of a method stay together.
    clashing = {
        (run.name, source_of(run))
        for run in ordered
        if first[run.name, seed_of(run)] is not run and run.name != NO_EXCHANGE
    }
    if not clashing:
        return ordered
    count = Counter((run.name, source_of(run), seed_of(run)) for run in ordered)
    top = os.path.commonpath([source_of(run) for run in ordered])

    def name(run: Run) -> str:
        source = source_of(run)
        folder = source if count[run.name, source, seed_of(run)] == 1 else run.folder
        return f"{run.name} ({folder.relative_to(top)})" if (run.name, source) in clashing else run.name

    return [replace(run, name=name(run)) for run in ordered]


def _conditions(run: Run) -> tuple[str, ...]:
    workers = f"{run.workers} workers" if run.workers > 1 else "1 worker"
    hosts = f"on {run.hosts} hosts" if run.hosts > 1 else ""
    link = str((run.link or {}).get("asked") or "")
    return (
        _task(run), f"{workers} {hosts}".strip(), link,
        str(run.hardware.get("gpu") or run.hardware.get("cpu") or ""),
    )  # fmt: skip


def _metric(runs: Sequence[Run]) -> Metric:
    named = [run.settings.get("measure") for run in runs]
    recorded = [
        name for name in METRICS for run in runs if name in run.results or f"valid/{name}" in run.metrics
    ]
    name = next((n for n in named if isinstance(n, str)), None) or next(iter(recorded), "loss")
    higher = next((h for run in runs if isinstance(h := run.settings.get("higher"), bool)), None)
    values = [run.results.get(name) for run in runs]
    values += [value for run in runs for _, _, value in run.metrics.get(f"valid/{name}", [])]
    is_fraction = name == "accuracy" and max(filter(is_number, values), default=0.0) <= 1
    higher = name not in ("bits_per_byte", "perplexity", "loss") if higher is None else higher
    return Metric(name, higher, 100.0 if is_fraction else 1.0)
