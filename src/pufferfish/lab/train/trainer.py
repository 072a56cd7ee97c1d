"""`train`: train a task from its first update to its score on the test data."""

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ...checkpoint import Checkpoint
from ...checkpoint.checkpoint import Resumed
from ...compression import DDPHook
from ...distributed.workers import Workers
from ...layers.names import unwrap
from ...local.local_steps import all_finite
from ...lowrank.files import save
from ...measure import Breakdown
from ..model_change import build_model_change
from ..report.formatting import format_bytes, format_score, format_seconds
from ..tasks import Task
from .console import Console
from .record import (
    ByteCounter,
    StepTimer,
    TrainingLog,
    check_same_run,
    has_unfinished_run,
    macs_per_row,
    open_log,
    peak_memory,
    reset_peak_memory,
)
from .settings import RunSettings, find_width
from .simulated import SimulatedDDP, SimulatedLocalRunner, SimulatedStepRunner
from .step import StepRunner, build_components, worker_seed
from .timing import log_predicted_step
from .workers import process_group, sigint_as_sigterm, worker_device


def train(
    task: Task, settings: RunSettings, *, link: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Train to the end and return the results on the test data; None if the run was stopped after a checkpoint.

    Call it in every process that torchrun has started, in all processes of an existing group, or in a single process.

    Args:
        link: between the hosts, for run.json: {"asked", "got_mbit", "latency_ms"}.

    >>> import dataclasses, tempfile
    >>> from pathlib import Path
    >>> from pufferfish.lab.tasks import find_task
    >>> from pufferfish.lab.method_name import training_method
    >>> task = find_task("digits:mlp,width=4")
    >>> recipe = dataclasses.replace(task.recipe("short"), epochs=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(task, RunSettings(training_method("dense"), recipe, Path(folder), quiet=True))["parameters"]
    1482
    """
    device = worker_device(settings.device)
    with process_group(settings.device, settings.timeout) as world_size:
        workers = Workers.of_job("train", side_group=True)
        workers.run_on_first(lambda: check_same_run(task, settings))  # before anything takes time
        data = workers.run_on_all(lambda: _load_data(task, settings, world_size))
        if settings.method.narrow is not None:
            width = workers.run_on_all(lambda: find_width(task, settings))
            settings = replace(settings, narrow=width)
        if settings.compile:
            torch.compiler.reset()  # torch compiles a limited number of models of one class
        run = TrainingRun(task, settings, data, workers, device, link)
        with run.checkpoint:
            results = run.train()
        if results is not None and settings.save_model and settings.method.pruning is None:
            workers.run_on_first(lambda: save(run.module, settings.folder / "model"))
        if world_size > 1:
            dist.barrier()  # a worker that leaves early would break the others' connections
        return results


def _load_data(task: Task, settings: RunSettings, world_size: int) -> Any:
    """Load the data; raises all errors that may concern a single worker."""
    settings.check(task, world_size)
    data = task.load(settings.data)
    task.steps(data, settings.recipe.batch)
    return data


#: Updates between rows of the log.
LOG_EVERY = 20
#: Between checkpoints at the end of epochs, at least.
SAVE_SECONDS = 10.0
_WORST_SCORE = -1e30
#: Keys of a checkpoint's position, and the attributes that they hold.
_POSITION = {
    "best": "best_score", "factor": "lr_factor", "phase": "phase_start", "elapsed": "simulated_seconds",
}  # fmt: skip


class TrainingRun:
    """One process of a run; `train` runs its epochs, from the last checkpoint on."""

    def __init__(
        self,
        task: Task,
        settings: RunSettings,
        data: Any,
        workers: Workers,
        device: torch.device,
        link: Mapping[str, Any] | None,
    ) -> None:
        self.task, self.settings, self.recipe, self.link = task, settings, settings.recipe, link
        self.data, self.workers, self.device = data, workers, device
        self.console = Console(silent=settings.quiet or workers.rank > 0, brief=settings.brief)
        reset_peak_memory(device)
        c = self.components = build_components(task, settings, data, workers.rank, workers.size, device)
        self.model, self.module, self.optimizer = c.model, c.module, c.optimizer
        self.world_size, self.hook = c.world_size, c.hook
        self.runner: StepRunner
        if settings.simulate is None:
            self.runner = StepRunner(c)
        elif settings.method.local:
            self.runner = local_steps = SimulatedLocalRunner(c)
            self.hook = local_steps.steps
        else:
            self.runner = steps = SimulatedStepRunner(c)
            self.hook = steps.ddp
        workers.run_on_all(self._check)
        torch.manual_seed(worker_seed(settings.seed, workers.rank))
        self.steps_per_epoch = task.steps(data, self.recipe.batch)
        self.change = workers.run_on_all(lambda: build_model_change(c, self.steps_per_epoch))
        self.change.sync = self._sync
        self.total_steps = self.change.epochs * self.steps_per_epoch
        self.checkpoint = Checkpoint(
            settings.folder / "checkpoints", self.model, self.optimizer,
            compressor=self.hook, data=self.runner, **self.change.checkpoint_parts,
        )  # fmt: skip
        self.timer = StepTimer(device)
        self.last_save = time.monotonic()
        self.step, self.diverged = 0, False  # updates done; whether the weights are not finite
        self.best_score, self.lr_factor = _WORST_SCORE, 1.0  # of validation; of the plateau schedule
        self.ddp_bytes = 0.0  # sent by this process if nothing is compressed
        self.bytes = ByteCounter(self._sent, settings.method.local.h if settings.method.local else 1)
        self.phase_start = 0  # updates before the model's last change
        self.phase_waited = 0.0  # seconds of waiting for local steps that belong to no timed step
        self.predicted_step: float | None = None  # seconds, for simulated workers
        self.simulated_seconds = 0.0

    def _check(self) -> None:
        with self.settings.autocast:
            self.task.check(self.module, self.data, self.device)

    def train(self) -> dict[str, Any] | None:
        """Train to the end and return the results; None if the run was stopped after a checkpoint."""
        at = self._resume()
        done = self.step
        resume = done if at else None
        opened = self.workers.run_on_all(lambda: open_log(self.components, self.link, resume))
        with sigint_as_sigterm(), opened as log:
            self.change.untimed = log.paused
            if self.settings.simulate:
                known = log.data["predicted"].get("seconds_a_step") if at else None
                self.predicted_step = known or log_predicted_step(self.components, log, self.console, done)
            if at and done % self.steps_per_epoch == 0:
                self.diverged = self._weights_diverged()
            for epoch in range(done // self.steps_per_epoch, self.change.epochs):
                if self.diverged:
                    break
                start = done % self.steps_per_epoch
                if start == 0:
                    self._change_model(epoch, log)
                if not (self._timed_epoch(epoch, start, log) and self._end_epoch(epoch, log)):
                    self.console.info(
                        f"stopped after {self.step} updates, checkpoint saved; rerun the same command to resume"
                    )
                    log.close(finished=False)
                    return None
                done = self.step
            if self.diverged:
                self.console.info(f"inf or NaN in the weights after {done} updates; training ends here")
            training_seconds = log.training_seconds
            with log.paused():
                return self._results(log, training_seconds)

    def _resume(self) -> Resumed | None:
        """Continue from the last checkpoint, if there is one, and say with what the run starts."""
        self.change.restore(self.checkpoint.folder)
        with warnings.catch_warnings():
            # Said below instead: warnings of workers that a command has started are not shown.
            warnings.filterwarnings("ignore", ".*: not restored: ")
            at = self.checkpoint.resume()
        self.step = at.position["step"] if at else 0
        if at:
            self.runner.resumed(self.change)
            for key, name in _POSITION.items():
                setattr(self, name, at.position.get(key, getattr(self, name)))
            self.bytes.load(at.position)
            lost = f"; not restored: {'; '.join(at.reset)}" if at.reset else ""
            text = "resumed after update" if self.step < self.total_steps else "all updates are done:"
            self.console.info(f"{text} {self.step} of {self.total_steps}{lost}")
        elif has_unfinished_run(self.settings):
            self.console.info("no checkpoint yet, starting over")
        method = self.settings.method.compress
        if self.world_size == 1 and method is not None:
            self.console.info(f"one worker sends no gradients: {method} has no effect")
        if self.world_size > 1 and method is not None and method.has_momentum:
            self.console.info(f"{method} has its own momentum, so the optimizer's momentum is switched off")
        if self.settings.narrow is not None:
            self.console.info(self.settings.narrow.note)
        return at

    def _timed_epoch(self, epoch: int, start: int, log: TrainingLog) -> bool:
        """Train an epoch and log where its time went; not for a simulation."""
        parts: dict[str, float] = {}
        if self.settings.simulate:
            finished = self._epoch(epoch, start, log)
        else:
            waited = self.runner.waited
            with Breakdown(self.runner.model, self.optimizer) as times:
                finished = self._epoch(epoch, start, log)
            waited = (self.runner.waited - waited) / max(times.steps, 1)
            parts = times.parts | {
                "exchange": times.parts["exchange"] + waited,
                "data": times.parts["data"] - waited,
            }
        log.log(step=self.step, epoch=epoch + 1, **{f"time/{name}": x for name, x in parts.items()})
        return finished

    def _epoch(self, epoch: int, start: int, log: TrainingLog) -> bool:
        """Train an epoch from its update `start` on; False if the run was stopped after a checkpoint."""
        self.model.train()
        self.step = epoch * self.steps_per_epoch + start
        ring = 2 * (self.world_size - 1) / self.world_size  # of a tensor's bytes in a ring all-reduce
        ddp_bytes_per_step = ring * sum(p.nbytes for p in self.module.parameters() if p.requires_grad)
        self.timer.tick()
        self.runner.begin_epoch(epoch, start)
        for i in range(start, self.steps_per_epoch):
            lr = self.recipe.lr_at(*self.change.schedule_position(self.step)) * self.lr_factor
            with self.bytes.update():
                loss = self.runner.update(lr)
                self.ddp_bytes += ddp_bytes_per_step
            self.change.after_step()
            self.timer.tick()
            self.step += 1
            if self.predicted_step is not None:
                self.simulated_seconds += self.predicted_step
                log.simulated_seconds = self.simulated_seconds
            last = i + 1 == self.steps_per_epoch
            if self.step % LOG_EVERY == 0 or last:
                lr = float(self.optimizer.param_groups[0]["lr"])
                row = {"loss": float(loss), "lr": lr, "bytes": self.bytes.total}
                log.log(step=self.step, epoch=self.step / self.steps_per_epoch, **row)
                if not math.isfinite(row["loss"]):
                    text = f"training loss {row['loss']} at update {self.step}: check the data, or lower --lr"
                    self.console.once("diverged", text)
            if self.console.progress_due():
                self._show_progress(epoch, float(loss))
            due = self.settings.save_every is not None and self.step % self.settings.save_every == 0
            if due and not last:
                self.timer.pause()
                with log.paused():
                    self.checkpoint.save(step=self.step, **self._position())
                self.timer.tick()
            if not last and self.checkpoint.step(step=self.step, **self._position()):
                return False
        self.timer.pause()
        return True

    def _end_epoch(self, epoch: int, log: TrainingLog) -> bool:
        """Validate and save; False if the run was stopped after a checkpoint.

        Between the averages of local steps the model is that of the first worker, at the end that of all.
        """
        if epoch + 1 == self.change.epochs:
            self._sync()
        with log.paused():
            self.diverged = self._weights_diverged()
            self._validate(epoch, log)
            stop = self.checkpoint.step(step=self.step, **self._position())
            if not stop and self._save_due(epoch):
                self.checkpoint.save(step=self.step, **self._position())
                self.last_save = time.monotonic()
        return not stop

    def _weights_diverged(self) -> bool:
        """Whether weights of worker 0 are not finite, at the end of an epoch. Local steps return to their last average."""
        weights, local = [*self.module.parameters()], self.settings.method.local
        return self.workers.run_on_first(lambda: not (local or all_finite(weights)))

    def _sync(self) -> None:
        """Average what local steps have not averaged yet."""
        before = self.runner.waited
        self.runner.sync()
        self.bytes.end_round()
        self.phase_waited += self.runner.waited - before

    def _save_due(self, epoch: int) -> bool:
        """Whether to save at the end of an epoch, as worker 0 decides; saving may take longer than an epoch."""
        last = self.diverged or epoch + 1 == self.change.epochs
        always = last or self.settings.save_every is not None
        due = self.last_save + SAVE_SECONDS
        return self.workers.run_on_first(lambda: always or time.monotonic() > due)

    def _show_progress(self, epoch: int, loss: float) -> None:
        position = f"epoch {epoch + 1}/{self.change.epochs}, update {self.step}/{self.total_steps}"
        sent, left = format_bytes(self.bytes.total), format_seconds(self._seconds_left())
        # A narrow terminal cuts the end, so the most interesting part comes first.
        self.console.progress(f"{left} left, {position}: training loss {loss:.4f}, {sent} sent")

    def _seconds_left(self) -> float:
        return (self.total_steps - self.step) * (self.timer.recent() or 0.0)

    def _position(self) -> dict[str, float]:
        """Further state of the run for a checkpoint."""
        return {key: getattr(self, name) for key, name in _POSITION.items()} | self.bytes.state()

    def _change_model(self, epoch: int, log: TrainingLog) -> None:
        if not self.change.begin_epoch(epoch):
            return
        self.runner.model_changed()
        self.timer.reset()
        self.bytes.model_changed()
        self.phase_waited = self.runner.waited
        self.phase_start = self.step
        if self.change.schedule_position(self.step)[0] < self.step:  # the schedule starts over
            self.best_score, self.lr_factor = _WORST_SCORE, 1.0
        self.console.info(self.change.summary)
        self.change.log_change(log, self.step)
        if self.settings.simulate:
            self.predicted_step = log_predicted_step(self.components, log, self.console, self.step)

    def _evaluate(self, split: str) -> dict[str, float]:
        """Scores of worker 0, broadcast to all: buffers, and so decisions, may differ between workers."""

        def evaluate() -> dict[str, float]:
            with self.settings.autocast:
                return self.task.evaluate(unwrap(self.module), self.data, split, device=self.device)

        return self.workers.run_on_first(evaluate)

    def _validate(self, epoch: int, log: TrainingLog) -> None:
        position = f"epoch {epoch + 1}/{self.change.epochs}"
        if getattr(self.task, "held", None) == 0:
            self.console.info(f"{position}: no validation data was held out")
            return
        scores = self._evaluate("valid")
        log.log(step=self.step, epoch=epoch + 1, **{f"valid/{name}": x for name, x in scores.items()})
        score = scores[self.task.metric] * (1 if self.task.higher_is_better else -1)
        if self.recipe.schedule == "plateau" and score <= self.best_score:
            self.lr_factor *= self.recipe.plateau
        self.best_score = max(self.best_score, score)
        shown = f", validation {format_score(self.task.metric, scores[self.task.metric])}"
        further = "loss" in scores and self.task.metric != "loss"
        loss = f", validation loss {scores['loss']:.4f}" if further else ""
        left = f", {format_seconds(self._seconds_left())} left" if self.step < self.total_steps else ""
        self.console.info(f"{position}{shown}{loss}{left}")

    def _results(self, log: TrainingLog, training_seconds: float) -> dict[str, Any]:
        results = self._evaluate("test") | self.change.results(log)
        results |= {
            "updates": self.step,
            "updates_before_change": self.phase_start,
            "bytes": self.bytes.total,
            "bytes_a_step": self.bytes.since_change / max(self.step - self.phase_start, 1),
            "peak_bytes": self.bytes.peak,
        }
        local = self.settings.method.local
        if local is not None:
            results |= {
                "bytes_a_round": self.bytes.round,
                "exchange_updates": max(local.delay, 1),
            }
        if not self.settings.simulate:
            measured: dict[str, Any] = {
                "seconds_a_step": self.timer.median(), "training_seconds": training_seconds,
                "peak_memory": peak_memory(self.device),
            }  # fmt: skip
            if local is not None:  # one update in several waits
                waited, total = self.runner.waited - self.phase_waited, self.timer.total()
                measured["seconds_a_step"] = self.timer.mean()
                measured["utilisation"] = 1 - waited / total if total else None
            if self.timer.median() is None and log.writes:  # the run was finished already
                measured = {key: log.data["results"].get(key) for key in measured}
            results |= {key: x for key, x in measured.items() if x is not None}
        if self.settings.narrow is not None:
            results["notes"] = [self.settings.narrow.note]
        # Last, since it copies the model, which must not count as peak memory.
        results |= macs_per_row(self.components, self.change, self.console)
        log.result(**results)
        return results

    def _sent(self) -> float:
        """Bytes that this process has sent; plain DDP is counted as a ring all-reduce of the gradients."""
        if self.settings.method.local is not None:
            return self.runner.wire_bytes
        if isinstance(self.hook, DDPHook | SimulatedDDP) and self.settings.method.compress is not None:
            return self.hook.meter.wire_bytes
        return self.ddp_bytes
