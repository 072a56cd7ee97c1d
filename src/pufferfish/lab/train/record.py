"""The records of a run: its folder and log, the seconds of its steps, the bytes it sent, its memory and MACs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.folder import list_checkpoints
from ...measure import RunLog, read_run
from ...measure.breakdown import Timestamp, elapsed, reached, timestamp
from ...measure.run_log import RUN_FILE, read_run_file
from ..model_change import ROWS, ModelChange, few_rows
from ..tasks import Task
from .console import Console
from .settings import RunSettings
from .step import RunComponents


def open_log(components: RunComponents, link: Mapping[str, Any] | None, resume: int | None) -> TrainingLog:
    """Open the log of a new run, or of a run that resumes after `resume` updates."""
    settings = components.settings
    if settings.simulate and link is None:
        link = {"asked": settings.network, "got_mbit": None, "latency_ms": None}
    if resume is None and has_unfinished_run(settings):
        resume = 0  # it ended before its first checkpoint
    log = TrainingLog(
        settings.folder, settings.tensorboard, resume, name=settings.method.name, settings=_record(components.task, settings),
        seed=settings.seed, workers=components.world_size, hosts=settings.hosts, link=link,
    )  # fmt: skip
    if log.writes and components.task.source is not None:
        name, text = components.task.source
        (settings.folder / name).write_text(text, encoding="utf-8")
    return log


def has_unfinished_run(settings: RunSettings) -> bool:
    """Whether the folder holds a run that did not finish."""
    path = settings.folder / RUN_FILE
    return path.exists() and not read_run_file(path)["finished"]


def check_same_run(task: Task, settings: RunSettings) -> None:
    """Raise ValueError if the folder holds a run with other settings."""
    folder = settings.folder
    if not list_checkpoints(folder / "checkpoints") or not (folder / RUN_FILE).exists():
        return
    check_same_task(task, folder)
    run = read_run(folder)
    saved = run.settings | {"seed": run.seed}
    given = _record(task, settings) | {"seed": settings.seed}
    names = [
        "method", "seed", "precision", "accumulate", "plan", "mode", "simulated", "recipe",
    ]  # fmt: skip
    if settings.simulate:  # a real job may continue with another number of workers, on another network
        saved |= {"workers": run.workers, "network": run.link and run.link["asked"]}
        given |= {"workers": settings.simulate, "network": settings.network}
        names += ["workers", "network"]
    for name in names:
        old, new = saved.get(name), json.loads(json.dumps(given.get(name)))
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            name = next(key for key in new if old.get(key) != new[key])
            old, new = old.get(name), new[name]
        raise ValueError(f"{folder}: it holds a run with {name} {old}, not {new}; choose another --out")


def check_same_task(task: Task, folder: Path) -> None:
    """Raise ValueError if the folder holds a run of another task, or of a user's file that has changed since then."""
    old, new = read_run(folder).settings.get("task"), repr(task)
    if old == new:
        return
    if task.source is not None and (folder / task.source[0]).is_file():
        raise ValueError(
            f"{folder}: {task.source[0]} has changed since this run started, and {folder / task.source[0]} is its text "
            "of then; undo the change, or choose another --out for a new run"
        )
    raise ValueError(f"{folder}: it holds a run with task {old}, not {new}; choose another --out")


def _record(task: Task, settings: RunSettings) -> dict[str, Any]:
    """The settings in run.json."""
    plan = settings.method.low_rank.plan_identity if settings.method.low_rank else None
    return {
        "task": repr(task), "method": settings.method.name, "measure": task.metric, "higher": task.higher_is_better,
        "precision": settings.precision, "accumulate": settings.accumulate, "mode": "compile" if settings.compile else "eager",
        "simulated": bool(settings.simulate), "recipe": dataclasses.asdict(settings.recipe),
        **({"plan": plan} if plan else {}),
        **({"narrow": dataclasses.asdict(settings.narrow)} if settings.narrow else {}),
    }  # fmt: skip


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


class StepTimer:
    """Measures the time from the end of one step to the end of the next, without synchronizing the device at each step.

    >>> timer = StepTimer(torch.device("cpu"))
    >>> timer.tick(), timer.tick(), timer.pause()
    (None, None, None)
    >>> timer.median() >= 0
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timestamps: list[Timestamp] = []
        self._seconds: list[float] = []

    def tick(self) -> None:
        """Mark the end of a step, or the start of the first one."""
        self._timestamps.append(timestamp(self.device))

    def pause(self) -> None:
        """Exclude the time until the next `tick`. Synchronizes the device."""
        self._seconds += [elapsed(a, b) for a, b in pairwise(self._timestamps)]
        self._timestamps = []

    def reset(self) -> None:
        """Discard all steps so far."""
        self._timestamps, self._seconds = [], []

    def recent(self) -> float | None:
        """Return the mean seconds of the last 50 steps that have finished; does not synchronize the device."""
        done = [m for m in self._timestamps[-50:] if reached(m)]
        if len(done) > 1:
            return elapsed(done[0], done[-1]) / (len(done) - 1)
        return statistics.mean(self._seconds[-50:]) if self._seconds else None

    def total(self) -> float:
        """Return the seconds of all steps."""
        return sum(self._seconds)

    def mean(self) -> float | None:
        """Return the mean seconds per step; None without steps."""
        return statistics.mean(self._seconds) if self._seconds else None

    def median(self) -> float | None:
        """Return the median seconds per step; None without steps."""
        return statistics.median(self._seconds) if self._seconds else None


class ByteCounter:
    """Bytes sent in all, since the model's last change, and at most in one update and one round of local steps.

    Args:
        sent: Gives the bytes that this process has sent so far.
        round_updates: Updates in a round of local steps.

    >>> sent = [0]
    >>> counter = ByteCounter(lambda: sent[0], round_updates=2)
    >>> for n in (10, 30, 20):
    ...     with counter.update():
    ...         sent[0] += n
    >>> counter.total, counter.peak, counter.round
    (60.0, 30.0, 50.0)
    """

    def __init__(self, sent: Callable[[], float], round_updates: int = 1) -> None:
        self._sent = sent
        self._earlier = 0.0  # sent before the last restart
        self._change = 0.0  # sent before the model's last change
        self.peak, self.round = 0.0, 0.0  # in one update and in one round, at most, since that change
        self._recent: deque[float] = deque(maxlen=round_updates)  # totals before its updates

    @property
    def total(self) -> float:
        return self._earlier + self._sent()

    @property
    def since_change(self) -> float:
        return self.total - self._change

    @contextmanager
    def update(self) -> Iterator[None]:
        self._recent.append(self.total)
        yield
        now = self.total
        self.peak = max(self.peak, now - self._recent[-1])
        self.round = max(self.round, now - self._recent[0])

    def end_round(self) -> None:
        """Forget the updates of a round that ends early: the next one starts anew."""
        self._recent.clear()

    def model_changed(self) -> None:
        self._change = self.total
        self.peak = self.round = 0.0

    def state(self) -> dict[str, float]:
        """State of the counter for a checkpoint."""
        return {"sent": self.total, "phase_sent": self._change, "peak": self.peak, "round": self.round}

    def load(self, state: Mapping[str, float]) -> None:
        self._earlier, self._change = state.get("sent", 0.0), state.get("phase_sent", 0.0)
        self.peak, self.round = state.get("peak", 0.0), state.get("round", 0.0)


def reset_peak_memory(device: torch.device) -> None:
    """Measure the peak from here on, where the system supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Return peak bytes: of tensors on a GPU, else of this process. None where the system does not report it.

    >>> peak_memory(torch.device("cpu")) is None or peak_memory(torch.device("cpu")) > 10**6
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def macs_per_row(components: RunComponents, change: ModelChange, console: Console) -> dict[str, Any]:
    """Return {"macs": …} for the current model; an empty dict, and a message why, where they cannot be counted."""
    task, recipe = components.task, components.settings.recipe
    rows = min(ROWS, recipe.batch)
    batch = few_rows(task, recipe, components.data, components.device)

    def example(model: nn.Module) -> Tensor:
        return task.loss(model, batch, recipe)

    try:
        return {"macs": round(change.forward_macs(example) / rows)}
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        console.info(f"MACs are not counted: {str(error).splitlines()[0]}")
        return {}
