"""`Run`: the epochs of a run, in one process: train, validate, save, change; and what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from ...checkpoint import Checkpoint
from ...checkpoint.control import Control
from ...compression import Hook
from ...layers.names import unwrap
from ...measure import Breakdown
from ..report.numbers import nbytes, seconds
from ..tasks.task import Task
from .changes import change
from .macs_per_row import macs_a_row
from .pace import Pace, forget_peak, peak
from .parts import build
from .predicted_step import tell
from .process_group import interruptible
from .run_records import begun, log_of
from .screen import Screen
from .settings import Settings
from .simulated_updates import Simulated, worker_seed
from .sinks import Log
from .updates import Updates

#: From one row of the log to the next, in updates.
EVERY = 20
#: From one checkpoint at the end of an epoch to the next, at least.
SAVE_SECONDS = 10.0


class Run:
    """One run of one process: `go` through its epochs, from where it was."""

    def __init__(
        self,
        task: Task,
        given: Settings,
        data: Any,
        control: Control,
        device: torch.device,
        link: Mapping[str, Any] | None,
    ) -> None:
        self.task, self.given, self.recipe, self.link = task, given, given.recipe, link
        self.data, self.control, self.device = data, control, device
        self.screen = Screen(silent=given.quiet or control.rank > 0)
        forget_peak(device)
        self.parts = build(task, given, data, control.rank, control.size, device)
        self.model, self.bare, self.optimizer = self.parts.model, self.parts.bare, self.parts.optimizer
        self.size, self.hook = self.parts.size, self.parts.hook
        self.updates = Simulated(self.parts) if given.simulate else Updates(self.parts)
        if isinstance(self.updates, Simulated):
            self.hook = self.updates.workers.hook
        torch.manual_seed(worker_seed(given.seed, control.rank))
        self.an_epoch = task.steps(data, self.recipe.batch)
        self.change = control.together(lambda: change(self.parts, self.an_epoch))
        self.steps = self.change.epochs * self.an_epoch
        self.checkpoint = Checkpoint(
            given.folder / "checkpoints", self.model, self.optimizer,
            scaler=self.parts.scaler, compressor=self.hook, data=self.updates, **self.change.kept,
        )  # fmt: skip
        self.pace = Pace(device)
        self.saved = time.monotonic()  # when
        self.now = 0  # updates done
        self.best, self.factor = -1e30, 1.0  # of validation, and what a plateau has made of the rate
        self.sent = 0.0  # bytes on the wire by processes before this one
        self.plain = 0.0  # by this one, without a hook
        self.phase, self.phase_sent = 0, 0.0  # updates and bytes before the model became what it is
        self.predicted: float | None = None  # seconds of a step, where workers are simulated
        self.elapsed = 0.0  # of all so far

    def go(self) -> dict[str, Any] | None:
        self.change.restore(self.checkpoint.folder)
        at = self.checkpoint.resume()
        done = self.now = at.position["step"] if at else 0
        if at:
            for name in self._position():
                setattr(self, name, at.position.get(name, getattr(self, name)))
            self.screen.say(f"goes on after update {done} of {self.steps}")
        elif begun(self.given):
            self.screen.say("no checkpoint yet, from the start")
        if self.size == 1 and self.given.choice.compress is not None:
            self.screen.say(f"one worker sends nothing: {self.given.choice.compress} changes nothing")
        with interruptible(), self._log(done if at else None) as log:
            self.change.aside = log.paused
            if self.given.simulate:
                known = log.data["predicted"].get("seconds_a_step")
                self.predicted = known or tell(self.parts, log, self.screen, done)
            for epoch in range(done // self.an_epoch, self.change.epochs):
                if done % self.an_epoch == 0:
                    self._change(epoch, log)
                if not self._timed(epoch, done % self.an_epoch, log) or not self._ended(epoch, log):
                    self.screen.say(
                        f"stopped after {self.now} updates, all is saved; the same command goes on"
                    )
                    log.close(finished=False)
                    return None
                done = self.now
            trained = log.clock
            with log.paused():
                return self._results(log, trained)

    def _timed(self, epoch: int, start: int, log: Log) -> bool:
        """An epoch, and where its time went. Of a graph nobody sees the parts; a simulation's times are nobody's."""
        parts: dict[str, float] = {}
        if self.given.simulate:
            finished = self._epoch(epoch, start, log)
        elif self.given.graph:
            finished = self._epoch(epoch, start, log)
            parts = {"step": self.pace.recent() or 0.0}
        else:
            with Breakdown(self.model, self.optimizer) as times:
                finished = self._epoch(epoch, start, log)
            parts = times.parts
        log.log(step=self.now, epoch=epoch + 1, **{f"time/{name}": x for name, x in parts.items()})
        return finished

    def _log(self, resume: int | None) -> Log:
        return self.control.together(lambda: log_of(self.parts, self.link, resume))

    def _epoch(self, epoch: int, start: int, log: Log) -> bool:
        """False when somebody asked to stop, and all is saved."""
        self.model.train()
        self.updates.begin(epoch, start)
        self.now = epoch * self.an_epoch + start
        a_step = 2 * (self.size - 1) / self.size * sum(p.nbytes for p in self.bare.parameters())
        self.pace.tick()
        for here in range(start, self.an_epoch):
            loss = self.updates.update(self.recipe.rate(*self.change.schedule(self.now)) * self.factor)
            self.change.after_step()
            self.pace.tick()
            self.now += 1
            self._predicted(log)
            self.plain += a_step
            last = here + 1 == self.an_epoch
            if self.now % EVERY == 0 or last:
                row = {"loss": float(loss), "lr": self._lr(), "bytes": self._bytes()}
                log.log(step=self.now, epoch=self.now / self.an_epoch, **row)
            if self.screen.due():
                self._show(epoch, float(loss))
            due = self.given.save_every is not None and self.now % self.given.save_every == 0
            if due and not last:
                self.pace.pause()
                with log.paused():
                    self.checkpoint.save(step=self.now, **self._position())
                self.pace.tick()
            if not last and self.checkpoint.step(step=self.now, **self._position()):
                return False
        self.pace.pause()
        return True

    def _predicted(self, log: Log) -> None:
        """The time of simulated workers goes on by what a step is predicted to take."""
        if self.predicted is not None:
            self.elapsed += self.predicted
            log.elapsed = self.elapsed

    def _ended(self, epoch: int, log: Log) -> bool:
        """An epoch is over: validate and save. False when somebody asked to stop."""
        with log.paused():
            self._validate(epoch, log)
            stop = self.checkpoint.step(step=self.now, **self._position())
            if not stop and self._worth_saving(epoch):
                self.checkpoint.save(step=self.now, **self._position())
                self.saved = time.monotonic()
        return not stop

    def _worth_saving(self, epoch: int) -> bool:
        """Epochs may be shorter than saving takes; the last one is always kept. Rank 0 decides."""
        late = epoch + 1 == self.change.epochs or self.given.save_every is not None
        return self.control.first(lambda: late or time.monotonic() > self.saved + SAVE_SECONDS)

    def _show(self, epoch: int, loss: float) -> None:
        at = f"epoch {epoch + 1}/{self.change.epochs}, update {self.now}/{self.steps}"
        sent, left = nbytes(self._bytes()), seconds(self._left())
        # What is looked for first: a narrow terminal cuts the end.
        self.screen.progress(f"{left} left, {at}: training loss {loss:.4f}, {sent} sent")

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _left(self) -> float:
        """Seconds, if updates go on as they did."""
        return (self.steps - self.now) * (self.pace.recent() or 0.0)

    def _position(self) -> dict[str, float]:
        """What else a resumed run has to know, by the attributes' names."""
        known = {name: getattr(self, name) for name in ("best", "factor", "phase", "phase_sent", "elapsed")}
        return known | {"sent": self._bytes()}

    def _change(self, epoch: int, log: Log) -> None:
        if not self.change.begin_epoch(epoch):
            return
        self.updates.changed()
        self.pace.restart()
        self.phase, self.phase_sent = self.now, self._bytes()
        if self.change.schedule(self.now)[0] < self.now:  # the rate's schedule begins anew
            self.best, self.factor = -1e30, 1.0
        self.screen.say(self.change.report)
        self.change.changed(log)
        if self.given.simulate:
            self.predicted = tell(self.parts, log, self.screen, self.now)

    def _evaluate(self, split: str) -> dict[str, float]:
        """By rank 0, for all: buffers differ between workers, and so might decisions."""

        def evaluated() -> dict[str, float]:
            with self.given.autocast:
                return self.task.evaluate(unwrap(self.bare), self.data, split, device=self.device)

        return self.control.first(evaluated)

    def _validate(self, epoch: int, log: Log) -> None:
        at = f"epoch {epoch + 1}/{self.change.epochs}"
        if getattr(self.task, "held", None) == 0:
            self.screen.say(f"{at}: nothing was held out to validate on")
            return
        found = self._evaluate("valid")
        log.log(step=self.now, epoch=epoch + 1, **{f"valid/{name}": x for name, x in found.items()})
        score = found[self.task.measure] * (1 if self.task.higher else -1)
        if self.recipe.schedule == "plateau" and score <= self.best:
            self.factor *= self.recipe.plateau
        self.best = max(self.best, score)
        shown = f", validation {self.task.measure} {found[self.task.measure]:.2f}"
        loss = f", validation loss {found['loss']:.4f}" if "loss" in found else ""
        self.screen.say(f"{at}{shown}{loss}, {seconds(self._left())} left")

    def _results(self, log: Log, trained: float) -> dict[str, Any]:
        found = self._evaluate("test") | self.change.results(log)
        found |= {"bytes_a_step": (self._bytes() - self.phase_sent) / max(self.now - self.phase, 1)}
        measured: dict[str, Any] = {}
        if not self.given.simulate:
            measured = {"seconds_a_step": self.pace.median(), "training_seconds": trained}
            measured |= {"peak_memory": peak(self.device)}
            if self.pace.median() is None and log.writes:  # nothing was left to do: what it took then
                measured = {key: log.data["results"].get(key) for key in measured}
        results = found | {key: x for key, x in measured.items() if x is not None}
        results |= macs_a_row(
            self.parts, self.change, self.screen
        )  # a copy, which memory's peak must not see
        log.result(**results)
        return results

    def _bytes(self) -> float:
        """On the wire, of this rank. What plain DDP sends is what a ring makes of the gradients."""
        if isinstance(self.hook, Hook) and self.given.choice.compress is not None:
            return self.sent + self.hook.meter.wire_bytes
        return self.sent + self.plain
