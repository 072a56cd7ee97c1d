"""`run_beside`: does the pieces of a bench in processes of their own, several side by side, for a limited time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...measure import read_run
from ...planning.json_file import read_json
from ..report.formatting import format_score, format_seconds
from ..train.console import Console
from ..train.signals import sigterm_as_sigint
from .bench_pieces import Piece, due_pieces, is_done
from .bench_settings import BenchSettings

LOGS = "logs"
#: Kinds of pieces whose time is used for kinds of which none is finished.
_SIMILAR = {"runs": "tune", "equal-time": "runs", "equal-bytes": "runs"}
#: Lines of a failed process that are shown.
_LAST_LINES = 15


@dataclass
class Pool:
    """The processes of a bench on this machine.

    Args:
        options: arguments of `BenchWorker`, for JSON.
        beside: runs at once. Measurements have the machine for themselves.
        minutes: no piece is started that is expected to end later; None: no limit.
        expected: seconds of a run, as long as none is finished.
        on_done: called after each finished piece.

    Attributes:
        failed: names of pieces that failed; they are not tried again.
        left: pieces that were not started for lack of time.
    """

    settings: BenchSettings
    root: Path
    options: dict[str, Any]
    console: Console
    beside: int = 1
    minutes: float | None = None
    expected: float | None = None
    on_done: Callable[[Piece], None] = lambda piece: None
    failed: list[str] = field(default_factory=list)
    left: list[Piece] = field(default_factory=list)

    def run(self) -> None:
        """Do all pieces for which there is time. Ctrl-C and SIGTERM stop the processes after a checkpoint."""
        self._end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        running: dict[Future[float], Piece] = {}
        with sigterm_as_sigint(), ThreadPoolExecutor(self.beside) as threads:
            try:
                while True:
                    for piece in self._next(list(running.values())):
                        self.console.info(f"{piece.name} …")
                        running[threads.submit(self._process, piece)] = piece
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        self._finish(running.pop(future), future.result())
            except BaseException:
                for process in [*self._processes.values()]:
                    process.terminate()
                raise

    def _next(self, running: list[Piece]) -> list[Piece]:
        """The pieces to start now."""
        due = [piece for piece in due_pieces(self.settings, self.root, self.failed) if piece not in running]
        fitting = [piece for piece in due if self._fits(piece)]
        self.left = [piece for piece in due if piece not in fitting]
        alone = [piece for piece in fitting if piece.alone]
        if any(piece.alone for piece in running):
            return []
        if alone and not running:
            return alone[:1]
        return [piece for piece in fitting if not piece.alone][: self.beside - len(running)]

    def _fits(self, piece: Piece) -> bool:
        return self._end is None or time.monotonic() + self.expected_seconds(piece) <= self._end

    def expected_seconds(self, piece: Piece) -> float:
        """The longest time of finished pieces of its method and kind, or else of its kind, or of a similar kind."""
        times = wall_seconds(self.root)
        kind: str | None = piece.kind
        scale = 1.0
        while kind is not None:
            of_kind = {(p.method, p.name): t for p, t in times.items() if p.kind == kind}
            own = [seconds for (method, _), seconds in of_kind.items() if method == piece.method]
            if of_kind:
                return scale * max(own or of_kind.values())
            kind = _SIMILAR.get(kind)
            if kind == "tune" and self.settings.tune_epochs:
                scale = self.settings.resolve()[1].epochs / self.settings.tune_epochs
        return 0.0 if piece.alone or self.expected is None else self.expected

    def _process(self, piece: Piece) -> float:
        """Do a piece in a process; returns its seconds."""
        start = time.monotonic()
        log = self._log(piece)
        log.parent.mkdir(parents=True, exist_ok=True)
        options = self.options | {"only": piece.name, "beside": 1 if piece.alone else self.beside}
        command = [
            sys.executable,
            "-m",
            f"{__package__}.bench_worker",
            str(self.root),
            "--options",
            json.dumps(options),
        ]
        with log.open("wb") as output:
            # The process ends when this pipe is closed, also by the death of this process.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )
            self._processes[piece.name] = process
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
        del self._processes[piece.name]
        return time.monotonic() - start

    def _finish(self, piece: Piece, seconds: float) -> None:
        if is_done(self.root, piece.name):
            self.on_done(piece)
            self.console.info(f"{piece.name}: {self._result(piece)}{format_seconds(seconds)}")
            return
        self.failed.append(piece.name)
        lines = self._log(piece).read_text(errors="replace").splitlines()[-_LAST_LINES:]
        self.console.info("\n".join([f"{piece.name} failed:", *lines]))

    def _result(self, piece: Piece) -> str:
        """The validation score of a tuning run, and the test score of another one."""
        if piece.alone:
            return ""
        run, (task, _) = read_run(self.root / piece.name), self.settings.resolve()
        curve = run.metrics.get(f"valid/{task.metric}", [])
        score = (curve[-1][2] if curve else None) if piece.kind == "tune" else run.results.get(task.metric)
        return "no finite score, " if score is None else f"{format_score(task.metric, score)}, "

    def _log(self, piece: Piece) -> Path:
        return self.root / LOGS / f"{piece.name.replace('/', '_')}.txt"


def wall_seconds(root: Path) -> dict[Piece, float]:
    """Seconds of the processes of all finished pieces that recorded them."""
    times: dict[Piece, float] = {}
    for path in [
        *root.glob("*/*/*/run.json"),
        *root.glob("widths/*.json"),
        *root.glob("equal-*/*/length.json"),
    ]:
        data = read_json(path)
        is_run = path.name == "run.json"
        seconds = data["results"].get("wall_seconds") if is_run else data.get("wall_seconds")
        if seconds is not None:
            name = str((path.parent if is_run else path).relative_to(root))
            times[Piece(name, data["name" if is_run else "method"], alone=not is_run)] = float(seconds)
    return times
