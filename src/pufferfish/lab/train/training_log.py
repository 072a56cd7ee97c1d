"""`TrainingLog`: a `RunLog` that excludes evaluation from its clock and writes to sinks too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...measure import RunLog
from .sinks import SINKS, Sink


class TrainingLog(RunLog):
    """A `RunLog` whose clock can be paused, and whose rows also go to sinks.

    Args:
        sinks: names of `SINKS`.
        record: other arguments of `RunLog`.
    """

    def __init__(
        self, folder: Path, sinks: Sequence[str] = (), resume: int | None = None, **record: Any
    ) -> None:
        super().__init__(folder, resume=resume, **record)
        self.simulated_seconds: float | None = None  # predicted training time of simulated workers
        self._sinks: list[Sink] = []
        for name in sinks if self.writes else ():
            self._sinks.append(SINKS[name](folder, resume))

    def __enter__(self) -> TrainingLog:
        return self

    @property
    def training_seconds(self) -> float:
        """Seconds of training so far, including those before a restart."""
        return self._previous_seconds + time.perf_counter() - self._started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the enclosed work from the training time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - start

    def log(self, *, step: int, epoch: float | None = None, **values: Any) -> None:
        if self.simulated_seconds is not None:
            self._previous_seconds, self._started = self.simulated_seconds, time.perf_counter()
        super().log(step=step, epoch=epoch, **values)
        for sink in self._sinks:
            sink.log(step, epoch, {name: float(x) for name, x in values.items()})

    def close(self, finished: bool = True) -> None:
        super().close(finished)
        while self._sinks:
            self._sinks.pop().close()
