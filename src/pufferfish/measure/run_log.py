"""`RunLog`: a run's folder, written from any loop: `run.json` (what ran where) and `metrics.csv` (what came of it)."""

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
from .machine import hardware, versions
from .saved_run import CSV, HEAD, JSON, VERSION, Run, fields_of, read, rows_of

__all__ = ["Run", "RunLog", "read"]

_RESUME = "resume= takes how many steps its checkpoint has done"


class RunLog:
    """Writes a run's folder; only rank 0 does, on the others all calls do nothing.

    A folder whose run did not finish is taken over. With `resume` its rows up to that step stay and the clock goes
    on from there; without, the run starts anew and a warning says how many rows that cost. A finished run is never
    overwritten; with `resume` it goes on, too. Beside a `Checkpoint`, open the log after its `resume`:

        at = checkpoint.resume()
        log = RunLog("runs/mine", resume=at.position["step"] if at else None)

    Args:
        folder: made if it is not there.
        name: of the run; the folder's by default.
        settings: whatever tells this run from another; anything that JSON can hold.
        link: for instance `{"asked": "1gbit", "got_mbit": 941.2, "latency_ms": 0.2}`.
        resume: how many steps were done when the checkpoint was written that the run goes on from.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RunLog(folder, name="try", settings={"lr": 0.1}) as log:
    ...         log.log(step=1, loss=2.5)
    ...         log.log(step=2, loss=2.25, **{"valid/accuracy": 0.5})
    ...         log.result(accuracy=0.5)
    ...     run = read(folder)
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
        self._began, self._before = time.perf_counter(), 0.0
        if not self.writes:
            return
        here: dict[str, Any] = {
            "pufferfish_run": VERSION,
            "name": name or self.folder.resolve().name,
            "settings": dict(settings or {}),
            "versions": versions(),
            "hardware": hardware(),
            "seed": seed,
            "workers": workers or (dist.get_world_size() if _in_job() else 1),
            "hosts": hosts,
            "link": link and dict(link),
            "started": _time(),
            "finished": None,
            "results": {},
            "predicted": {},
            "layers": [],
        }
        _text(here, self.folder / JSON)  # what JSON cannot hold is refused before anything is written
        self.folder.mkdir(parents=True, exist_ok=True)
        old = fields_of(self.folder / JSON) if (self.folder / JSON).exists() else None
        if old and old["finished"] and resume is None:
            raise ValueError(
                f"{self.folder}: it holds a finished run, {old['name']!r}; choose another folder, "
                f"or go on with it: {_RESUME}"
            )
        rows: list[list[str]] = []
        if old and resume is not None:
            rows = [row for _, row in rows_of(self.folder / CSV) if int(row[1]) <= resume]
            self._before = float(rows[-1][0]) if rows else 0.0
            here |= {key: old[key] for key in ("started", "results", "predicted", "layers")}
        elif old:
            _warn_of_lost_rows(self.folder / CSV)
        self.data = here
        _replace(self.folder / CSV, _lines([HEAD, *rows]))
        self._write()
        self._file = (self.folder / CSV).open("a", newline="", encoding="utf-8")

    def log(self, *, step: int, epoch: float | None = None, **values: Any) -> None:
        """One row for each value (a number, or a tensor of one element), after `step` updates."""
        if self._file is None:
            return
        seconds = f"{self._before + time.perf_counter() - self._began:.6f}"
        at = [seconds, str(int(step)), "" if epoch is None else repr(float(epoch))]
        self._file.write(_lines([[*at, name, repr(float(_plain(value)))] for name, value in values.items()]))
        self._file.flush()

    def result(self, **values: Any) -> None:
        """Figures that stand for the whole run: accuracy, seconds_a_step, bytes_a_step, parameters, peak_memory …"""
        self._add("results", values)

    def predict(self, **values: Any) -> None:
        """What a cost model says they will be."""
        self._add("predicted", values)

    def describe(
        self,
        *,
        link: Mapping[str, Any] | None = None,
        layers: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """What becomes known during the run: the link that was measured, the layers and their ranks."""
        if self.writes:
            self.data |= {} if link is None else {"link": dict(link)}
            self.data |= {} if layers is None else {"layers": [dict(layer) for layer in layers]}
            self._write()

    def close(self, finished: bool = True) -> None:
        """The run is over; a run that is closed unfinished can be resumed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.data["finished"] = _time() if finished else None
            self._write()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)

    def _add(self, what: str, values: Mapping[str, Any]) -> None:
        if self.writes:
            self.data[what].update({name: _number(value) for name, value in values.items()})
            self._write()

    def _write(self) -> None:
        path = self.folder / JSON
        _replace(path, _text(self.data, path))


def _warn_of_lost_rows(path: Path) -> None:
    lost = path.read_bytes().count(b"\n") - 1 if path.is_file() else 0
    if lost > 0:
        said = (
            f"{path}: the rows of a run that did not finish are thrown away ({lost}); to keep them, {_RESUME}"
        )
        warnings.warn(said, stacklevel=3)


def _lines(rows: Sequence[Sequence[str]]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _replace(path: Path, text: str) -> None:
    """The file is the old one or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8", newline="")
    sync(aside)
    aside.replace(path)


def _text(data: Mapping[str, Any], path: Path) -> str:
    try:
        return json.dumps(data, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise TypeError(f"{path}: settings, link and layers must be what JSON can hold: {error}") from None


def _number(value: Any) -> Any:
    """For JSON, which knows no NaN; text and lists stay as they are."""
    value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    rank = os.environ.get("RANK", "0")  # torchrun's, before the group is there
    return dist.get_rank() if _in_job() else int(rank) if rank.isdigit() else 0


def _time() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
