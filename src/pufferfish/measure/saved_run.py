"""`read_run`: reads a run's folder as `RunLog` writes it."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..planning.json_file import read_json

RUN_FILE, METRICS_FILE = "run.json", "metrics.csv"
VERSION = 1
COLUMNS = ["seconds", "step", "epoch", "name", "value"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Contents of a run's folder."""

    folder: Path
    name: str
    settings: dict[str, Any]
    versions: dict[str, Any]
    hardware: dict[str, Any]
    seed: int | None
    workers: int
    hosts: int
    link: dict[str, Any] | None
    started: str
    finished: str | None
    results: dict[str, Any]
    predicted: dict[str, Any]
    layers: list[dict[str, Any]]
    metrics: dict[str, list[tuple[float, int, float]]]  # by name: (seconds, step, value)


def read_run(folder: str | Path) -> Run:
    """Read the folder of a run, finished or not.

    >>> read_run("/nowhere")
    Traceback (most recent call last):
    ValueError: /nowhere has no run.json: it is not the folder of a run
    """
    folder = Path(folder)
    if not (folder / RUN_FILE).is_file():
        raise ValueError(f"{folder} has no {RUN_FILE}: it is not the folder of a run")
    fields = read_run_file(folder / RUN_FILE)
    metrics: dict[str, list[tuple[float, int, float]]] = {}
    for seconds, step, _, name, value in read_metrics(folder / METRICS_FILE):
        metrics.setdefault(name, []).append((float(seconds), int(step), float(value)))
    return Run(folder=folder, metrics=metrics, **fields)


def read_run_file(path: Path) -> dict[str, Any]:
    """Read the fields of a `run.json`; a missing or invalid one is a ValueError."""
    data = read_json(path)
    version = data.pop("pufferfish_run", None) if isinstance(data, dict) else None
    if version != VERSION:
        raise ValueError(f"{path} is not a run of format version {VERSION}, the only one supported")
    fields = [name for name in Run.__dataclass_fields__ if name not in ("folder", "metrics")]
    missing = [name for name in fields if name not in data]
    if missing:
        raise ValueError(f"{path}: missing fields: {', '.join(missing)}")
    return {name: data[name] for name in fields}


def read_metrics(path: Path) -> Iterator[list[str]]:
    """Rows of a `metrics.csv`. An incomplete last line, cut off by a crash or still being written, is skipped."""
    if not path.is_file():
        raise ValueError(f"{path} is missing beside {RUN_FILE}")
    text = path.read_text(encoding="utf-8")
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    for row in reader:
        if reader.line_num == 1:
            if row != COLUMNS:
                raise ValueError(f"{path}:1: the columns must be {','.join(COLUMNS)}")
            continue
        try:
            seconds, step, epoch, _, value = row
            float(seconds), int(step), float(epoch or 0), float(value)
        except ValueError:
            raise ValueError(f"{path}:{reader.line_num}: {','.join(row)!r} is not a valid row") from None
        yield row
