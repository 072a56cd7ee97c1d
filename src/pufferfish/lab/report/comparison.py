"""`Comparison`: finished runs of a task, by method and seed, from run folders and the folders of benches."""

import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from ...measure import Run, read_run
from ...planning.json_file import read_json
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


SUMMARY = "summary.json"
#: Name of the table row for a dense DDP step without any exchange; it has no score.
NO_EXCHANGE = "no exchange"


def is_tuning_run(folder: Path) -> bool:
    """Whether a run of a bench only tried a learning rate. Such runs are not reported.

    >>> is_tuning_run(Path("/nowhere/tune/dense/lr-0.1"))
    False
    """
    return _bench_root(folder, "tune") is not None


def source_of(run: Run) -> Path:
    """The bench folder that a run belongs to; for other runs their own folder."""
    return _bench_root(run.folder, "runs") or run.folder.resolve()


def add_timings(runs: Sequence[Run]) -> list[Run]:
    """Replace the step times of bench runs by those of the bench's timed rounds, and sort by the bench's methods.

    Adds a run named `NO_EXCHANGE` for each bench that timed steps without the exchange.
    """
    summaries = {run.folder: _summary(run) for run in runs}

    def position(run: Run) -> int:
        names = list(summaries[run.folder])
        return names.index(run.name) if run.name in names else len(names)

    empty: dict[str, Any] = {"results": {}, "predicted": {}}
    ordered = sorted(runs, key=position)
    merged = [_with_timing(run, summaries[run.folder].get(run.name, empty)) for run in ordered]
    roots = {run.folder: _root(run.folder, "runs") for run in runs if NO_EXCHANGE in summaries[run.folder]}
    for root in dict.fromkeys(root for root in roots.values() if root):
        in_bench = [run for run in runs if roots.get(run.folder) == root]
        first = min(in_bench, key=lambda run: (run.name != "dense", run.seed or 0))
        bare = replace(
            first, name=NO_EXCHANGE, folder=root / "timing", results={}, predicted={}, layers=[], metrics={},
            settings=first.settings | {"method": NO_EXCHANGE}, finished=first.finished or first.started,
        )  # fmt: skip
        merged.append(_with_timing(bare, summaries[first.folder][NO_EXCHANGE]))
    return merged


def _with_timing(run: Run, timing: dict[str, Any]) -> Run:
    results, predicted = run.results | timing["results"], run.predicted | timing["predicted"]
    if notes := [note for part in (run.results, timing["results"]) for note in part.get("notes") or ()]:
        results["notes"] = notes
    return replace(run, results=results, predicted=predicted)


def _root(folder: Path, kind: str) -> Path | None:
    """The bench folder of the run KIND/METHOD/RUN."""
    above = folder.parents
    return above[2] if len(above) > 2 and above[1].name == kind else None


def _bench_root(folder: Path, kind: str) -> Path | None:
    root = _root(folder.resolve(), kind)
    return root if root is not None and (root / "bench.json").is_file() else None


def _summary(run: Run) -> dict[str, Any]:
    """Timings by method, from the bench that the run belongs to."""
    root = _root(run.folder, "runs")
    if root is None or not (root / SUMMARY).is_file():
        return {}
    try:
        summary: dict[str, Any] = read_json(root / SUMMARY)["methods"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{root / SUMMARY}: not a summary of a bench; run the bench again") from None
    return summary


# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom.
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A mean, half the width of its 95 % interval (None for a single value), and the number of values."""

    mean: float
    half: float | None
    count: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0.

        >>> estimate([0.4, 0.5, 0.6]).significant, estimate([-0.4, 0.5, 0.6]).significant, estimate([0.5]).significant
        (True, False, False)
        """
        return self.half is not None and abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of the values with its interval; None without values.

    >>> estimate([93.0, 93.5, 94.0])
    Estimate(mean=93.5, half=1.242..., count=3)
    """
    if not values:
        return None
    n = len(values)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Estimate(statistics.fmean(values), half, n)


def t_quantile(freedom: int) -> float:
    """Half-width of the central 95 % of Student's t distribution, in standard errors.

    >>> t_quantile(2), round(t_quantile(60), 3)
    (4.3027, 2.0)
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL  # an expansion in 1 / freedom, accurate to four digits beyond the table
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def paired_differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """`ours - theirs` for every seed that both have.

    >>> paired_differences({0: 3.0, 1: 5.0}, {1: 4.0, 2: 9.0})
    [1.0]
    """
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def paired_speedup(theirs: Mapping[int, float], ours: Mapping[int, float]) -> float | None:
    """Median of `theirs / ours` over the seeds that both have: for seconds, the speedup.

    >>> paired_speedup({0: 6.0, 1: 6.2}, {0: 3.0, 1: 2.0, 2: 9.0})
    2.55
    """
    ratios = [theirs[seed] / ours[seed] for seed in ours.keys() & theirs.keys() if ours[seed]]
    return statistics.median(ratios) if ratios else None
