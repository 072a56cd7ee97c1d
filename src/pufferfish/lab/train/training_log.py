"""`TrainingLog`: a `RunLog` that excludes evaluation from its clock, and writes to TensorBoard too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...measure import RunLog


class TrainingLog(RunLog):
    """A `RunLog` whose clock can be paused, and whose rows also go to TensorBoard.

    Args:
        tensorboard: write event files to the folder `tensorboard` in the run's.
        record: other arguments of `RunLog`.
    """

    def __init__(
        self, folder: Path, tensorboard: bool = False, resume: int | None = None, **record: Any
    ) -> None:
        super().__init__(folder, resume=resume, **record)
        self.simulated_seconds: float | None = None  # predicted training time of simulated workers
        self._tensorboard: Any = None
        if tensorboard and self.writes:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = None if resume is None else resume + 1
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

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
        for name, x in values.items() if self._tensorboard else ():
            self._tensorboard.add_scalar(name, float(x), step)

    def close(self, finished: bool = True) -> None:
        super().close(finished)
        if self._tensorboard:
            self._tensorboard.close()
