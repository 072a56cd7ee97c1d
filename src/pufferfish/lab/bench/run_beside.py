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
from ..report.formatting import format_score, format_seconds
from ..train.console import Console
from ..train.signals import sigterm_as_sigint
from .bench_pieces import Piece, due_pieces, is_done
from .bench_settings import BenchSettings
from .piece_times import PieceTimes

LOGS = "logs"
#: Lines of a failed process that are shown.
_LAST_LINES = 15


@dataclass
class Pool:
    """The processes of a bench on this machine.

    Args:
        options: arguments of `BenchWorker`, for JSON.
        beside: runs at once. Measurements have the machine for themselves, and share a process.
        minutes: no piece is started that is expected to end later; None: no limit.
        expected: seconds of a run that is alone, as long as none is finished.
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
    on_done: Callable[[], None] = lambda: None
    failed: list[str] = field(default_factory=list)
    left: list[Piece] = field(default_factory=list)

    def run(self) -> None:
        """Do all pieces for which there is time. Ctrl-C and SIGTERM stop the processes after a checkpoint."""
        self._end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        running: dict[Future[float], list[Piece]] = {}
        with sigterm_as_sigint(), ThreadPoolExecutor(self.beside) as threads:
            try:
                while True:
                    busy = [piece for pieces in running.values() for piece in pieces]
                    for pieces in self._next(busy):
                        for piece in pieces:
                            self.console.info(f"{piece.name} …")
                        running[threads.submit(self._process, pieces)] = pieces
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        pieces = running.pop(future)
                        for piece in pieces:
                            self._finish(piece, future.result() / len(pieces))
            except BaseException:
                for process in [*self._processes.values()]:
                    process.terminate()
                raise

    def _next(self, running: list[Piece]) -> list[list[Piece]]:
        """The pieces to start now, by process.

        Pieces are started in their order. Measurements wait for the runs before them to end, and the runs after them wait
        for the measurements.
        """
        if any(piece.alone for piece in running):
            return []
        times = PieceTimes.of(self.settings, self.root, self.expected)
        runs: list[Piece] = []
        measurements: list[Piece] = []
        self.left = []
        for piece in due_pieces(self.settings, self.root, self.failed):
            if piece in running:
                continue
            processes = len(running) + len(runs)
            earlier = sum(times.seconds(each, 1) for each in measurements)
            needed = earlier + times.seconds(piece, 1 if piece.alone else processes + 1)
            if self._end is not None and time.monotonic() + needed > self._end:
                self.left.append(piece)
            elif piece.alone and not processes:
                measurements.append(piece)
            elif piece.alone or measurements or processes == self.beside:
                break
            else:
                runs.append(piece)
        return [measurements] if measurements else [[run] for run in runs]

    def expected_seconds(self, piece: Piece) -> float:
        """Seconds of a piece that is started when nothing else runs."""
        return PieceTimes.of(self.settings, self.root, self.expected).seconds(piece, 1)

    def _process(self, pieces: list[Piece]) -> float:
        """Do pieces in one process; returns its seconds."""
        start = time.monotonic()
        log = self._log(pieces[0])
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            f"{__package__}.bench_worker",
            str(self.root),
            "--options",
            json.dumps(self._options(pieces)),
        ]
        with log.open("wb") as output:
            # The process ends when this pipe is closed, also by the death of this process.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )
            self._processes[pieces[0].name] = process
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
        del self._processes[pieces[0].name]
        return time.monotonic() - start

    def _options(self, pieces: list[Piece]) -> dict[str, Any]:
        """Arguments of the `BenchWorker` that does the pieces."""
        return self.options | {
            "only": [piece.name for piece in pieces],
            "beside": 1 if pieces[0].alone else self.beside,
            "skip": self.failed,
            "started": time.time(),
        }

    def _finish(self, piece: Piece, seconds: float) -> None:
        if is_done(self.root, piece.name):
            self.on_done()
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
        name = piece.kind if piece.alone else piece.name  # measurements of a kind share a process
        return self.root / LOGS / f"{name.replace('/', '_')}.txt"
