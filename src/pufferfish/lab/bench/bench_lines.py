"""`BenchLines`: the finished runs and measurements of benches as lines of JSON in one small file, without checkpoints."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...measure.saved_run import COLUMNS, METRICS_FILE, RUN_FILE, read_metrics
from ...planning.json_file import read_json
from ..report.comparison import METRICS
from .bench_pieces import is_done
from .bench_runs import bench_runs
from .bench_settings import BenchSettings, write_json
from .choose_rate import choose_rate
from .summary import write_summary

#: Settings that do not change the result of a run. A tuned rate is part of the run's record.
_FREE = ("methods", "seeds", "rounds", "tune", "tune_epochs", "equal", "validate_every")
#: What a line keeps of a layer's record; its spectra are large.
_LAYER = ("name", "shape", "full_rank", "rank")


class BenchLines:
    """A file with one line for each finished run or measurement of one or several benches.

    A run's line is its run.json, without the spectra of its layers, and its validation scores. Lines are only appended, and
    an incomplete last line is ignored.

    Args:
        path: created with the first line.
        part: name of the bench in the file.

    >>> import tempfile
    >>> settings = BenchSettings(task="digits", methods=())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     BenchLines(Path(folder) / "none.jsonl", "digits").restore(settings, Path(folder))
    []
    """

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part

    def add(self, settings: BenchSettings, root: Path, name: str) -> None:
        """Append a finished piece."""
        line: dict[str, Any] = {"part": self.part, "piece": name, "key": settings_key(settings)}
        if name.endswith(".json"):
            line["measured"] = read_json(root / name)
        else:
            line |= _run_line(settings, root / name, tuning=name.startswith("tune/"))
        _append(self.path, line)

    def restore(self, settings: BenchSettings, root: Path) -> list[str]:
        """Write the pieces in the file that fit the settings to a bench folder, and return their names.

        Pieces that are done in the folder stay. Runs whose learning rate is not the one chosen by the tuning are left out.
        """
        key = settings_key(settings)
        lines = [line for line in _read(self.path) if line["part"] == self.part and line["key"] == key]
        task, recipe = settings.resolve()
        epochs = settings.tune_epochs or recipe.epochs
        tuning = [x for x in lines if _is_tuning(x) and x["settings"]["recipe"]["epochs"] == epochs]
        restored = _restore_all([*tuning, *(line for line in lines if "measured" in line)], root)
        rates = {m: choose_rate(m, settings, root, task, recipe) for m in settings.methods}
        methods = {run.name: run.method for run in bench_runs(settings, recipe)}
        trained = [line for line in lines if line["piece"] in methods and not _is_tuning(line)]

        def has_chosen_rate(line: dict[str, Any]) -> bool:
            rate = rates[methods[line["piece"]]]
            return rate is not None and rate.lr == line["settings"]["recipe"]["lr"]

        return restored + _restore_all(filter(has_chosen_rate, trained), root)


def restore_parts(path: Path, folder: Path) -> list[Path]:
    """Write the runs in a file of `BenchLines` as bench folders, one for each part, for the report.

    Without the settings of the benches, the last line of a part tells which settings are the current ones, and the last line of
    a method its learning rate. Tuning runs are left out.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    by_part: dict[str, list[dict[str, Any]]] = {}
    for line in _read(path):
        by_part.setdefault(line["part"], []).append(line)
    roots = []
    for number, (part, lines) in enumerate(by_part.items()):
        current = [line for line in lines if line["key"] == lines[-1]["key"] and not _is_tuning(line)]
        runs = [line for line in current if "measured" not in line]
        rates = {line["name"]: line["settings"]["recipe"]["lr"] for line in runs}
        runs = [line for line in runs if line["settings"]["recipe"]["lr"] == rates[line["name"]]]
        if not runs:
            continue
        roots.append(folder / str(number))
        named = [line | {"settings": line["settings"] | {"part": part}} for line in runs]
        _restore_all([*named, *(line for line in current if "measured" in line)], roots[-1])
        write_summary(roots[-1], list(rates), {})
    if not roots:
        raise ValueError(f"{path}: no finished run")
    return roots


def settings_key(settings: BenchSettings) -> str:
    """A short checksum of all that results depend on, except methods, seeds and learning rates.

    >>> one, other = (BenchSettings(task="digits", methods=("auto",), seeds=n, tune=n) for n in (2, 3))
    >>> settings_key(one) == settings_key(other), settings_key(one) == settings_key(dataclasses.replace(one, epochs=3))
    (True, False)
    """
    task, recipe = settings.resolve()
    fields = {name: x for name, x in dataclasses.asdict(settings).items() if name not in _FREE}
    parts = [fields, repr(task), dataclasses.asdict(dataclasses.replace(recipe, lr=1.0))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not text.endswith("\n") or not text.strip():  # cut off by a crash
            continue
        try:
            line = json.loads(text)
            line["part"], line["piece"], line["key"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path}:{number}: not a line of a bench; delete it, or choose another file"
            ) from None
        yield line


def _run_line(settings: BenchSettings, folder: Path, tuning: bool) -> dict[str, Any]:
    """The record of a run. A tuning run is judged by validation only, so its test scores are left out."""
    run: dict[str, Any] = read_json(folder / RUN_FILE)
    metric = settings.resolve()[0].metric
    rows = [row for row in read_metrics(folder / METRICS_FILE) if row[3] == f"valid/{metric}"]
    curve = [[round(float(seconds), 3), int(step), float(value)] for seconds, step, _, _, value in rows]
    run["layers"] = [{name: layer.get(name) for name in _LAYER} for layer in run["layers"]]
    if tuning:
        run["results"] = {name: x for name, x in run["results"].items() if name not in (metric, *METRICS)}
        run["layers"], curve = [], curve[-1:]
    return run | {"validation": curve}


def _append(path: Path, line: dict[str, Any]) -> None:
    """Append a line durably; several processes may do so. An incomplete last line is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                _drop_last_line(file)
        file.write(json.dumps(line, allow_nan=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _drop_last_line(file: Any) -> None:
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def _is_tuning(line: dict[str, Any]) -> bool:
    return str(line["piece"]).startswith("tune/")


def _restore_all(lines: Any, root: Path) -> list[str]:
    latest = {line["piece"]: line for line in lines}
    for name, line in latest.items():
        if not is_done(root, name):
            _restore(line, root / name)
    return list(latest)


def _restore(line: dict[str, Any], path: Path) -> None:
    if "measured" in line:
        write_json(path, line["measured"])
        return
    shutil.rmtree(path, ignore_errors=True)  # of an unfinished run
    path.mkdir(parents=True)
    metric = line["settings"]["measure"]
    with (path / METRICS_FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for seconds, step, value in line["validation"]:
            writer.writerow([seconds, step, "", f"valid/{metric}", repr(value)])
    own = {name: x for name, x in line.items() if name not in ("part", "piece", "key", "validation")}
    write_json(path / RUN_FILE, own)
