"""`RunLog` writes a run's folder from any training loop: `run.json` (settings, results) and `metrics.csv`; `read_run` reads it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from .. import __version__
from ..planning import errors_name, read_json, write_text
from ..planning.json_file import new_file

RUN_FILE, METRICS_FILE = "run.json", "metrics.csv"
VERSION = 1
COLUMNS = ["seconds", "step", "epoch", "name", "value"]
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
        self.data: dict[str, Any] = {
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
        _to_json(self.data, self.folder / RUN_FILE)  # raises before anything is written
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = self._continue_run(resume)
        metrics_file = self.folder / METRICS_FILE
        with new_file(metrics_file) as fresh:
            write_text(fresh, _to_csv([COLUMNS, *rows]))
        self._write()
        self._file = metrics_file.open("a", newline="", encoding="utf-8")

    def _continue_run(self, resume: int | None) -> list[list[str]]:
        """Take over what is kept of a run in the folder; returns its rows up to `resume`."""
        run_file, metrics_file = self.folder / RUN_FILE, self.folder / METRICS_FILE
        if not run_file.exists():
            return []
        old = read_run_file(run_file)
        if resume is None:
            if old["finished"]:
                raise ValueError(
                    f"{self.folder} holds the finished run {old['name']!r}; choose another folder, or to continue "
                    f"that run {_HOW_TO_RESUME}"
                )
            discarded = metrics_file.read_bytes().count(b"\n") - 1 if metrics_file.is_file() else 0
            if discarded > 0:
                warnings.warn(
                    f"{metrics_file}: discarding {discarded} rows of an unfinished run; to keep them, {_HOW_TO_RESUME}",
                    stacklevel=3,
                )
            return []
        self.data |= {key: old[key] for key in ("started", "results", "predicted", "layers")}
        rows = [row for row in read_metrics(metrics_file) if int(row[1]) <= resume]
        self._previous_seconds = float(rows[-1][0]) if rows else 0.0
        return rows

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

    def describe(self, *, layers: Sequence[Mapping[str, Any]]) -> None:
        """Set what becomes known during the run: the layers and their ranks."""
        if self.writes:
            self.data["layers"] = [dict(layer) for layer in layers]
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
        with new_file(path) as fresh:
            write_text(fresh, _to_json(self.data, path))


def _to_csv(rows: Sequence[Sequence[str]]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


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


def versions() -> dict[str, str | None]:
    """Versions of Python, torch and pufferfish, and the git commit of the working directory."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pufferfish": __version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of the working directory, followed by + if files have changed since; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "core.fsmonitor=false", *arguments]  # a program that a repository may name
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """CPU, cores, torch threads, GPU and host name of this process."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "host": platform.node(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
