"""Where a run's numbers go beside its metrics.csv: JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ...measure import RunLog

JSONL = "metrics.jsonl"


class Sink(Protocol):
    """Takes what is logged, row by row."""

    def log(self, step: int, epoch: float | None, values: Mapping[str, float]) -> None:
        """The values after `step` updates."""

    def close(self) -> None:
        """The last row was written."""


class Log(RunLog):
    """A `RunLog` that tells others, too."""

    def __init__(
        self, folder: Path, sinks: Sequence[str] = (), resume: int | None = None, **about: Any
    ) -> None:
        super().__init__(folder, resume=resume, **about)
        self.elapsed: float | None = None  # of a simulation: seconds that its workers would have trained
        self._sinks: list[Sink] = []
        for name in sinks if self.writes else ():
            self._sinks.append(SINKS[name](folder, resume))

    def __enter__(self) -> Log:
        return self

    @property
    def clock(self) -> float:
        """Seconds of training so far, those before a restart too."""
        return self._before + time.perf_counter() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no training: its time is not the run's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - start

    def log(self, *, step: int, epoch: float | None = None, **values: Any) -> None:
        if self.elapsed is not None:
            self._before, self._began = self.elapsed, time.perf_counter()
        super().log(step=step, epoch=epoch, **values)
        for sink in self._sinks:
            sink.log(step, epoch, {name: float(x) for name, x in values.items()})

    def close(self, finished: bool = True) -> None:
        super().close(finished)
        while self._sinks:
            self._sinks.pop().close()


class JsonLines:
    """An object a row, in metrics.jsonl.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lines = JsonLines(Path(folder), None)
    ...     lines.log(20, 0.5, {"loss": 2.25})
    ...     lines.close()
    ...     (Path(folder) / JSONL).read_text()
    '{"step": 20, "epoch": 0.5, "loss": 2.25}\\n'
    """

    def __init__(self, folder: Path, resume: int | None) -> None:
        path = folder / JSONL
        kept: list[str] = []
        if resume is not None and path.exists():
            whole = [
                line for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")
            ]
            kept = [line for line in whole if json.loads(line)["step"] <= resume]
        path.write_text("".join(kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, epoch: float | None, values: Mapping[str, float]) -> None:
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        self._file.write(json.dumps({"step": step, "epoch": epoch, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files, in tensorboard/ of the run's folder."""

    def __init__(self, folder: Path, resume: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        later = None if resume is None else resume + 1
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=later)

    def log(self, step: int, epoch: float | None, values: Mapping[str, float]) -> None:
        for name, x in values.items():
            self._writer.add_scalar(name, x, step)

    def close(self) -> None:
        self._writer.close()


SINKS: dict[str, Any] = {"jsonl": JsonLines, "tensorboard": TensorBoard}


def check(sinks: Sequence[str]) -> None:
    """Refuse what does not exist or is not installed.

    >>> check(["jsonl"])
    """
    for name in sinks:
        if name not in SINKS:
            raise ValueError(f"there is no sink {name!r}; there are {', '.join(SINKS)}")
    if "tensorboard" in sinks and find_spec("tensorboard") is None:
        raise ImportError("--tensorboard: the package tensorboard is not installed: pip install tensorboard")
