"""A bench folder as the report reads it: its timed rounds are added to its runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...measure import Run
from ...planning.json_file import read_json

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
