"""`read`: a run's folder, as `RunLog` wrote it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON, CSV = "run.json", "metrics.csv"
VERSION = 1
HEAD = ["seconds", "step", "epoch", "name", "value"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's folder as `read` finds it."""

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
    metrics: dict[str, list[tuple[float, int, float]]]  # by name: seconds, step, value


def read(folder: str | Path) -> Run:
    """What a `RunLog` has written, finished or not.

    >>> read("/nowhere")
    Traceback (most recent call last):
    ValueError: /nowhere: there is no run.json; this is not the folder of a run
    """
    folder = Path(folder)
    if not (folder / JSON).is_file():
        raise ValueError(f"{folder}: there is no {JSON}; this is not the folder of a run")
    data = fields_of(folder / JSON)
    metrics: dict[str, list[tuple[float, int, float]]] = {}
    for _, (seconds, step, _, name, value) in rows_of(folder / CSV):
        metrics.setdefault(name, []).append((float(seconds), int(step), float(value)))
    return Run(folder=folder, metrics=metrics, **data)


_KINDS: dict[str, Any] = dict.fromkeys(("settings", "versions", "hardware", "results", "predicted"), dict) | {
    "workers": int, "hosts": int, "seed": int | None, "link": dict | None, "layers": list,
}  # fmt: skip


def fields_of(path: Path) -> dict[str, Any]:
    """A run.json's fields, all there."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: this is not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not text") from None
    found = data.pop("pufferfish_run", None) if isinstance(data, dict) else None
    if found != VERSION:
        raise ValueError(f"{path}: this is no run of version {VERSION}, the one that this pufferfish knows")
    fields = [name for name in Run.__dataclass_fields__ if name not in ("folder", "metrics")]
    missing = [name for name in fields if name not in data]
    if missing:
        raise ValueError(f"{path}: it lacks {', '.join(missing)}")
    for name, kind in _KINDS.items():
        if not isinstance(data[name], kind):
            raise ValueError(f"{path}: {name} is a {type(data[name]).__name__}; runs do not have it so")
    return {name: data[name] for name in fields}


def rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and rows. A last line without its end is one that a crash cut off, or a run is writing."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file beside {JSON}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not text") from None
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    for row in reader:
        if reader.line_num == 1:
            if row != HEAD:
                raise ValueError(f"{path}:1: the columns are not {','.join(HEAD)}")
            continue
        try:
            seconds, step, epoch, _, value = row
            float(seconds), int(step), float(epoch or 0), float(value)
        except ValueError:
            raise ValueError(f"{path}:{reader.line_num}: {','.join(row)!r} is no row of a run") from None
        yield reader.line_num, row
