"""`RunLog`: writes a run's folder from any training loop: `run.json` (settings, results) and `metrics.csv`."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..lowrank.files import sync
from ..planning.json_file import errors_name, write_text
from .machine import hardware, versions
from .saved_run import COLUMNS, METRICS_FILE, RUN_FILE, VERSION, read_metrics, read_run_file

_HOW_TO_RESUME = "pass resume=STEP, the step of its checkpoint"


class RunLog:
    """Writes a run's folder. Only rank 0 writes; on other workers all methods do nothing.

    If the folder holds an unfinished run, `resume` keeps its rows up to that step and continues its clock; without
    `resume` the run starts over, with a warning if rows are discarded. A finished run is never overwritten, but
    can be continued with `resume`. With a `Checkpoint`, open the log after `Checkpoint.resume`::

        at = checkpoint.resume()
        log = RunLog("runs/mine", resume=at.position["step"] if at else None)

    Args:
        folder: created if missing.
        name: name of the run (default: that of the folder).
        settings: settings that distinguish the run from others, as JSON types.
        seed: random seed, to tell repeated runs apart.
        workers: number of workers (default: the world size).
        hosts: number of machines.
        link: for example `{"asked": "1gbit", "got_mbit": 941.2, "latency_ms": 0.2}`.
        resume: number of steps done at the checkpoint from which the run resumes.

    >>> import tempfile
    >>> from pufferfish.measure import read_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RunLog(folder, name="try", settings={"lr": 0.1}) as log:
    ...         log.log(step=1, loss=2.5)
    ...         log.log(step=2, loss=2.25, **{"valid/accuracy": 0.5})
    ...         log.result(accuracy=0.5)
    ...     run = read_run(folder)
    >>> run.name, run.settings, run.results, [(step, loss) for _, step, loss in run.metrics["loss"]]
    ('try', {'lr': 0.1}, {'accuracy': 0.5}, [(1, 2.5), (2, 2.25)])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int | None = None,
        workers: int | None = None,
        hosts: int = 1,
        link: Mapping[str, Any] | None = None,
        resume: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.writes = _rank() == 0
        self._file: TextIO | None = None
        self._started, self._previous_seconds = time.perf_counter(), 0.0
        if not self.writes:
            return
        data: dict[str, Any] = {
            "pufferfish_run": VERSION,
            "name": name or self.folder.resolve().name,
            "settings": dict(settings or {}),
            "versions": versions(),
            "hardware": hardware(),
            "seed": seed,
            "workers": workers or (dist.get_world_size() if dist.is_initialized() else 1),
            "hosts": hosts,
            "link": link and dict(link),
            "started": _time(),
            "finished": None,
            "results": {},
            "predicted": {},
            "layers": [],
        }
        _to_json(data, self.folder / RUN_FILE)  # raises before anything is written
        self.folder.mkdir(parents=True, exist_ok=True)
        run_file, metrics_file = self.folder / RUN_FILE, self.folder / METRICS_FILE
        old = read_run_file(run_file) if run_file.exists() else None
        if old and old["finished"] and resume is None:
            raise ValueError(
                f"{self.folder} holds the finished run {old['name']!r}; choose another folder, or to continue "
                f"that run {_HOW_TO_RESUME}"
            )
        rows: list[list[str]] = []
        if old and resume is not None:
            rows = [row for row in read_metrics(metrics_file) if int(row[1]) <= resume]
            self._previous_seconds = float(rows[-1][0]) if rows else 0.0
            data |= {key: old[key] for key in ("started", "results", "predicted", "layers")}
        elif old:
            _warn_of_discarded_rows(metrics_file)
        self.data = data
        _write_atomically(metrics_file, _to_csv([COLUMNS, *rows]))
        self._write()
        self._file = metrics_file.open("a", newline="", encoding="utf-8")

    def log(self, *, step: int, epoch: float | None = None, **values: Any) -> None:
        """Write one row per value (a number or a one-element tensor), after `step` updates."""
        if self._file is None:
            return
        seconds = f"{self._previous_seconds + time.perf_counter() - self._started:.6f}"
        position = [seconds, str(int(step)), "" if epoch is None else repr(float(epoch))]
        rows = [[*position, name, repr(float(_item(value)))] for name, value in values.items()]
        with errors_name(self.folder / METRICS_FILE):
            self._file.write(_to_csv(rows))
            self._file.flush()

    def result(self, **values: Any) -> None:
        """Add results of the whole run: accuracy, seconds_a_step, bytes_a_step, parameters, peak_memory …"""
        self._add("results", values)

    def predict(self, **values: Any) -> None:
        """Add predicted results, under the same names as in `result`."""
        self._add("predicted", values)

    def describe(
        self, *, link: Mapping[str, Any] | None = None, layers: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Set what becomes known during the run: the measured link, the layers and their ranks."""
        if self.writes:
            self.data |= {} if link is None else {"link": dict(link)}
            self.data |= {} if layers is None else {"layers": [dict(layer) for layer in layers]}
            self._write()

    def close(self, finished: bool = True) -> None:
        """Close the log; a run closed with `finished=False` can be resumed."""
        if self._file is not None:
            file, self._file = self._file, None
            with errors_name(self.folder / METRICS_FILE):
                file.close()
            self.data["finished"] = _time() if finished else None
            self._write()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)

    def _add(self, field: str, values: Mapping[str, Any]) -> None:
        if self.writes:
            self.data[field].update({name: _json_value(value) for name, value in values.items()})
            self._write()

    def _write(self) -> None:
        path = self.folder / RUN_FILE
        _write_atomically(path, _to_json(self.data, path))


def _warn_of_discarded_rows(path: Path) -> None:
    rows = path.read_bytes().count(b"\n") - 1 if path.is_file() else 0
    if rows > 0:
        message = f"{path}: discarding {rows} rows of an unfinished run; to keep them, {_HOW_TO_RESUME}"
        warnings.warn(message, stacklevel=3)


def _to_csv(rows: Sequence[Sequence[str]]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    write_text(temporary, text)
    sync(temporary)
    temporary.replace(path)


def _to_json(data: Mapping[str, Any], path: Path) -> str:
    try:
        return json.dumps(data, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise TypeError(f"{path}: settings, link and layers must be JSON types: {error}") from None


def _json_value(value: Any) -> Any:
    """Convert tensors to numbers, and NaN and infinities, which JSON does not have, to None."""
    value = _item(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _rank() -> int:
    rank = os.environ.get("RANK", "0")  # set by torchrun, before the process group exists
    return dist.get_rank() if dist.is_initialized() else int(rank) if rank.isdigit() else 0


def _time() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
