"""A bench's folder as the report reads it: its timed rounds, laid over its runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...measure import Run

SUMMARY = "summary.json"
#: Plain DDP's step without any exchange, as if it were a method: a row without a score.
CEILING = "no exchange"


def tries(folder: Path) -> bool:
    """Whether a run only tried a learning rate: its score chose one, and counts for nothing else.

    >>> tries(Path("/nowhere/tune/dense/lr-0.1"))
    False
    """
    root = _root(folder.resolve(), "tune")
    return root is not None and (root / "bench.json").is_file()


def with_rounds(runs: Sequence[Run]) -> list[Run]:
    """Runs of a bench with the step of its rounds, which all methods took in turns, instead of their own."""
    summaries = {run.folder: _summary(run) for run in runs}

    def place(run: Run) -> int:
        """In the order that was asked for."""
        names = list(summaries[run.folder])
        return names.index(run.name) if run.name in names else len(names)

    nothing: dict[str, Any] = {"results": {}, "predicted": {}}
    found = [_laid(run, summaries[run.folder].get(run.name, nothing)) for run in sorted(runs, key=place)]
    roots = {run.folder: _root(run.folder, "runs") for run in runs if CEILING in summaries[run.folder]}
    for root in dict.fromkeys(root for root in roots.values() if root):
        of_it = [run for run in runs if roots.get(run.folder) == root]
        first = min(of_it, key=lambda run: (run.name != "dense", run.seed or 0))
        bare = replace(
            first, name=CEILING, folder=root / "timing", results={}, predicted={}, layers=[], metrics={},
            settings=first.settings | {"method": CEILING}, finished=first.finished or first.started,
        )  # fmt: skip
        found.append(_laid(bare, summaries[first.folder][CEILING]))
    return found


def _laid(run: Run, timed: dict[str, Any]) -> Run:
    return replace(run, results=run.results | timed["results"], predicted=run.predicted | timed["predicted"])


def _root(folder: Path, kind: str) -> Path | None:
    """The bench's folder that has this run as its KIND/METHOD/RUN."""
    above = folder.parents
    return above[2] if len(above) > 2 and above[1].name == kind else None


def _summary(run: Run) -> dict[str, Any]:
    """By method, of the bench that a run belongs to."""
    root = _root(run.folder, "runs")
    if root is None or not (root / SUMMARY).is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads((root / SUMMARY).read_text(encoding="utf-8"))["methods"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{root / SUMMARY}: this is not what a bench writes; run the bench again") from None
    return found
