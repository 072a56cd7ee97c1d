"""One training loop for all tasks, on one device or under torchrun; it resumes by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint import Checkpoint
from ..compress import Hook, compress
from ..factorize import ranks_of
from ..measure import Breakdown, RunLog
from ..names import unwrap
from ..plan import Plan
from .choice import Choice
from .tasks.task import Recipe, Task

#: From the loop to the log, in updates.
EVERY = 20


@dataclass(frozen=True)
class Settings:
    """What a run is told, beside its task.

    Args:
        choice: what becomes of the model and its gradients.
        recipe: the numbers.
        folder: for checkpoints and the log; a run that is there goes on.
        data: where the data lies.
        precision: of forward and backward: "fp32", "bf16" or "fp16".
        accumulate: backward passes an update.
        save_every: updates from one checkpoint to the next; None: at the end of every epoch.
    """

    choice: Choice
    recipe: Recipe
    folder: Path
    data: Path | None = None
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    accumulate: int = 1
    compile: bool = False
    save_every: int | None = None
    quiet: bool = False
    about: dict[str, Any] = field(default_factory=dict)  # more for run.json


def train(task: Task, given: Settings) -> dict[str, Any] | None:
    """Train to the end and score on the test data; None when it was asked to stop before, and has saved.

    Call it on every process that torchrun has started, or alone.
    """
    with _job(given.device) as (rank, size):
        device = (
            torch.device(given.device, rank % torch.cuda.device_count())
            if given.device == "cuda"
            else torch.device(given.device)
        )
        run = _Run(task, given, rank, size, device)
        with run.checkpoint:
            found = run.go()
        if size > 1:
            dist.barrier()  # nobody leaves while another still talks
        return found


@contextlib.contextmanager
def _job(device: str) -> Iterator[tuple[int, int]]:
    if "RANK" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


class _Run:
    def __init__(self, task: Task, given: Settings, rank: int, size: int, device: torch.device) -> None:
        recipe = given.recipe
        if recipe.batch % (size * given.accumulate):
            raise ValueError(
                f"a batch of {recipe.batch} does not go to {size} workers in {given.accumulate} equal parts; change --batch"
            )
        self.task, self.given, self.recipe = task, given, recipe
        self.rank, self.size, self.device = rank, size, device
        self.data = task.load(given.data)
        torch.manual_seed(given.seed)
        self.bare = task.build().to(device)
        if device.type == "cuda":
            self.bare.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = optimizer(self.bare, recipe)
        self.model: nn.Module = DistributedDataParallel(self.bare) if size > 1 else self.bare
        self.hook = None
        if given.choice.compress is not None and size > 1:
            self.hook = compress(self.model, given.choice.compress, optimizer=self.optimizer)
        if given.compile:
            self.model = torch.compile(self.model)  # type: ignore[assignment]
        torch.manual_seed(given.seed + 1000 * (rank + 1))  # dropout differs between workers
        self.switch = given.choice.switch(recipe, task.keep)
        self.scaler = torch.amp.GradScaler(device.type, enabled=given.precision == "fp16")
        self.checkpoint = Checkpoint(
            given.folder / "checkpoints", self.model, self.optimizer,
            switch=self.switch, scaler=self.scaler, compressor=self.hook,
        )  # fmt: skip
        self.an_epoch = task.steps(self.data, recipe.batch)
        self.steps = recipe.epochs * self.an_epoch
        self.best, self.factor = -1e30, 1.0  # of validation, and what a plateau has made of the rate
        self.sent = 0.0  # bytes on the wire by processes before this one
        self.plain = 0.0  # by this one, without a hook
        self.now = 0  # updates done

    def go(self) -> dict[str, Any] | None:
        at = self.checkpoint.resume()
        done = self.now = at.position["step"] if at else 0
        if at:
            self.best, self.factor, self.sent = (at.position[key] for key in ("best", "factor", "sent"))
        with _interruptible(), self._log(done if at else None) as log:
            for epoch in range(done // self.an_epoch, self.recipe.epochs):
                self._switch(epoch, log)
                with Breakdown(self.model, self.optimizer) as times:
                    finished = self._epoch(epoch, done % self.an_epoch, log)
                log.log(
                    step=self.now, epoch=epoch + 1, **{f"time/{name}": x for name, x in times.parts.items()}
                )
                if not finished:
                    self._say(f"stopped after {self.now} updates, all is saved; the same command goes on\n")
                    log.close(finished=False)
                    return None
                self._validate(epoch, log)
                done = self.now
                self.checkpoint.save(step=done, **self._position())
            return self._results(log)

    def _epoch(self, epoch: int, start: int, log: RunLog) -> bool:
        """False when somebody asked to stop, and all is saved."""
        generator = torch.Generator().manual_seed(_seed(self.given.seed, epoch))
        parts = self.given.accumulate
        batches = self.task.batches(
            self.data, "train", self.recipe.batch // parts, device=self.device, generator=generator,
            rank=self.rank, size=self.size, start=start * parts,
        )  # fmt: skip
        self.model.train()
        self.now, begun = epoch * self.an_epoch + start, time.perf_counter()
        for here in range(start, self.an_epoch):
            loss = self._update(batches)
            self.now += 1
            self.plain += 2 * (self.size - 1) / self.size * sum(p.nbytes for p in self.bare.parameters())
            if self.now % EVERY == 0 or here + 1 == self.an_epoch:
                value = float(loss)
                log.log(
                    step=self.now,
                    epoch=self.now / self.an_epoch,
                    loss=value,
                    lr=self._lr(),
                    bytes=self._bytes(),
                )
                left = (time.perf_counter() - begun) / (here + 1 - start) * (self.steps - self.now)
                at = f"epoch {epoch + 1}/{self.recipe.epochs}, update {self.now}/{self.steps}"
                self._progress(f"{at}: loss {value:.4f}, {left:.0f} s left")
            due = self.given.save_every is not None and self.now % self.given.save_every == 0
            if self.task.carries == 0 and due and here + 1 < self.an_epoch:
                self.checkpoint.save(step=self.now, **self._position())
            if self.task.carries == 0 and self.checkpoint.step(
                step=self.now, best=self.best, factor=self.factor
            ):
                return False
        return True

    def _position(self) -> dict[str, float]:
        """What else a resumed run has to know."""
        return {"best": self.best, "factor": self.factor, "sent": self._bytes()}

    def _update(self, batches: Iterator[Any]) -> torch.Tensor:
        parts = self.given.accumulate
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.now, self.steps) * self.factor
        total = torch.zeros((), device=self.device)
        for i in range(parts):
            last = i + 1 == parts
            with contextlib.nullcontext() if last or self.size == 1 else self._unsynchronised():
                with self._precision():
                    loss = self.task.loss(self.model, next(batches), self.recipe) / parts
                self.scaler.scale(loss).backward()
            total += loss.detach()
        if self.recipe.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.bare.parameters(), self.recipe.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return total

    def _unsynchronised(self) -> Any:
        ddp: Any = getattr(self.model, "_orig_mod", self.model)
        return ddp.no_sync()

    def _precision(self) -> torch.autocast:
        dtype = torch.float16 if self.given.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self.given.precision != "fp32")

    def _switch(self, epoch: int, log: RunLog) -> None:
        if self.switch is not None and self.switch.step(
            self.model, self.optimizer, epoch=epoch, total=self.recipe.epochs
        ):
            assert self.switch.report is not None
            self._say(f"\n{str(self.switch.report).splitlines()[0]}\n")
            log.describe(layers=layers(self.switch.report.plan))

    def _validate(self, epoch: int, log: RunLog) -> None:
        if getattr(self.task, "held", None) == 0:
            return  # nothing was held out
        with self._precision():
            found = self.task.evaluate(unwrap(self.bare), self.data, "valid", device=self.device)
        log.log(step=self.now, epoch=epoch + 1, **{f"valid/{name}": x for name, x in found.items()})
        score = found[self.task.measure] * (1 if self.task.higher else -1)
        if self.recipe.schedule == "plateau" and score <= self.best:
            self.factor *= self.recipe.plateau
        self.best = max(self.best, score)
        self._progress("")
        at = f"epoch {epoch + 1}/{self.recipe.epochs}"
        self._say(
            f"{at}: validation {self.task.measure} {found[self.task.measure]:.2f}, loss {found.get('loss', float('nan')):.4f}\n"
        )

    def _results(self, log: RunLog) -> dict[str, Any]:
        with self._precision():
            found = self.task.evaluate(unwrap(self.bare), self.data, "test", device=self.device)
        results = found | {
            "parameters": sum(p.numel() for p in self.bare.parameters()),
            "low_rank_layers": len(ranks_of(self.bare)),
            "bytes_a_step": self._bytes() / max(self.now, 1) if self.size > 1 else 0.0,
        }
        if self.device.type == "cuda":
            results["peak_memory"] = torch.cuda.max_memory_allocated(self.device)
        log.result(**results)
        return results

    def _bytes(self) -> float:
        """On the wire, of this rank. What plain DDP sends is what a ring makes of the gradients."""
        if isinstance(self.hook, Hook):
            return self.sent + self.hook.meter.wire_bytes
        return self.sent + self.plain

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _log(self, resume: int | None) -> RunLog:
        given = dataclasses.asdict(self.recipe)
        settings = {
            "task": repr(self.task), "method": self.given.choice.name, "measure": self.task.measure,
            "higher": self.task.higher, "precision": self.given.precision, "accumulate": self.given.accumulate,
            "compile": self.given.compile, "recipe": given, **self.given.about,
        }  # fmt: skip
        return RunLog(
            self.given.folder, name=self.given.choice.name, settings=settings, seed=self.given.seed,
            workers=self.size, resume=resume,
        )  # fmt: skip

    def _say(self, text: str) -> None:
        if self.rank == 0 and not self.given.quiet:
            print(text, end="", file=sys.stderr, flush=True)

    def _progress(self, text: str) -> None:
        """One line that is written over, on a terminal."""
        if sys.stderr.isatty():
            self._say(f"\r{text:<78}" if text else f"\r{'':<78}\r")


def optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's, with weight decay where it says.

    >>> [group["weight_decay"] for group in optimizer(nn.Linear(2, 2), Recipe(epochs=1, batch=1, lr=1.0, weight_decay=0.1)).param_groups]
    [0.1, 0.0]
    """
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {
            "params": [p for p in params if p.dim() < 2],
            "weight_decay": recipe.weight_decay if recipe.decay_vectors else 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=recipe.lr, betas=recipe.betas)


def layers(plan: Plan) -> list[dict[str, Any]]:
    """A plan's layers for run.json."""
    return [
        {
            "name": e.name, "shape": list(e.shape), "rank": e.rank, "full_rank": e.matrix.full_rank,
            "spectrum_before": None, "spectrum_after": None,
        }
        for e in plan.entries
        if e.matrix is not None
    ]  # fmt: skip


def _seed(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7], "big")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C asks to stop, as SIGTERM does; a second one ends at once."""

    def ask(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
