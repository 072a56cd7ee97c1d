"""`Task`: a model, its data and the recipes to train it. `Recipe`: the numbers."""

from __future__ import annotations

import contextlib
import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...layers.names import unwrap
from ..data.dataset import Dataset
from ..data.order import Epoch

Batch = tuple[Tensor, ...]

SCHEDULES = ("linear", "cosine", "steps", "inverse-sqrt", "plateau")
OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb", "sam")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is trained, in numbers alone: `dataclasses.asdict` makes JSON of it.

    Args:
        epochs: how often the training data is seen.
        batch: rows in an update, over all workers.
        lr: the highest learning rate; `rate` says what becomes of it.
        schedule: after the rise "linear" goes to 0, "cosine" to `floor`, "steps" takes a tenth at each of `milestones`,
            "inverse-sqrt" falls with the root of the step, and "plateau" stays until the loop multiplies it by
            `plateau` after an epoch that did not improve validation.
        warm_up: share of the run in which the learning rate rises from 0. Beyond 1 it never arrives.
        floor: share of `lr` that is left at the end.
        milestones: shares of the run.
        optimizer: "sgd", "adam", "adamw", "lars", "lamb", or "sam" (around SGD).
        momentum, nesterov: of SGD, LARS and SAM.
        betas: of Adam, AdamW and LAMB.
        trust: η of LARS.
        rho: ρ of SAM.
        weight_decay: on matrices and filters, and on vectors too if `decay_vectors`.
        label_smoothing: share of the target that is spread over all classes.
        clip: largest norm of the gradients; None: not clipped.
        switch_at: epochs of full-rank warm-up.
        switch_lr: factor on the learning rate from the switch on.
        rank: share of the full rank after the switch.

    >>> short = Recipe(epochs=10, batch=32, lr=0.4, warm_up=0.2)
    >>> [round(short.rate(step, 10), 2) for step in (0, 1, 2, 6, 9)]
    [0.2, 0.4, 0.4, 0.2, 0.05]
    """

    epochs: int
    batch: int
    lr: float
    schedule: str = "linear"
    warm_up: float = 0.0
    floor: float = 0.0
    milestones: tuple[float, ...] = ()
    plateau: float = 0.25
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    trust: float = 0.01
    rho: float = 0.05
    weight_decay: float = 0.0
    decay_vectors: bool = False
    label_smoothing: float = 0.0
    clip: float | None = None
    switch_at: int | None = None
    switch_lr: float = 1.0
    rank: float = 0.25

    def __post_init__(self) -> None:
        checks = [
            (self.epochs >= 1, f"epochs={self.epochs}: take 1 or more"),
            (self.batch >= 1, f"batch={self.batch}: take 1 or more"),
            (0 < self.lr < math.inf, f"lr={self.lr}: take a positive number"),
            (self.schedule in SCHEDULES, f"schedule={self.schedule!r}: there are {', '.join(SCHEDULES)}"),
            (
                self.optimizer in OPTIMIZERS,
                f"optimizer={self.optimizer!r}: there are {', '.join(OPTIMIZERS)}",
            ),
            (self.trust > 0, f"trust={self.trust}: take a positive number"),
            (self.rho > 0, f"rho={self.rho}: take a positive number"),
            (self.warm_up >= 0, f"warm_up={self.warm_up}: it is a share of the run, 0 or more"),
            (0 <= self.floor <= 1, f"floor={self.floor}: it is a share of lr, from 0 to 1"),
            (0 <= self.label_smoothing < 1, f"label_smoothing={self.label_smoothing}: take 0 to 1"),
            (self.clip is None or self.clip > 0, f"clip={self.clip}: take a positive number or None"),
            (self.schedule != "inverse-sqrt" or self.warm_up > 0, "schedule='inverse-sqrt' needs a warm_up"),
        ]
        for right, problem in checks:
            if not right:
                raise ValueError(f"Recipe: {problem}")

    def changed(self, *, epochs: int | None = None, batch: int | None = None) -> Recipe:
        """With these in place of its own; the full-rank warm-up keeps its share of the epochs.

        >>> Recipe(epochs=12, batch=32, lr=0.1, switch_at=4).changed(epochs=6).switch_at
        2
        """
        epochs = self.epochs if epochs is None else epochs
        at = self.switch_at and max(round(self.switch_at * epochs / self.epochs), 1)
        return replace(self, epochs=epochs, batch=self.batch if batch is None else batch, switch_at=at)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of update `step`, counted from 0, of `steps` in the run."""
        rise = self.warm_up * steps
        up = min((step + 1) / rise, 1.0) if rise else 1.0
        past = (step - rise) / max(steps - rise, 1.0)  # share of the run after the rise
        if self.schedule == "linear":
            factor = min(up, self.floor + (1 - self.floor) * (1 - max(past, 0.0)))
        elif self.schedule == "cosine":
            factor = min(up, self.floor + (1 - self.floor) * (1 + math.cos(math.pi * max(past, 0.0))) / 2)
        elif self.schedule == "steps":
            factor = up * 0.1 ** sum(step >= milestone * steps for milestone in self.milestones)
        elif self.schedule == "inverse-sqrt":
            factor = min(up, math.sqrt(rise / (step + 1)))
        else:
            factor = up
        return self.lr * factor


class Task(ABC):
    """What can be trained. An object holds a task's settings; nothing is loaded until `load`.

    A task of your own derives from this class; `pufferfish train file.py:task` takes an instance, or a class or
    function that makes one.
    """

    name: ClassVar[str]
    #: The figure of `evaluate` that counts, and whether more of it is better.
    measure: ClassVar[str]
    higher: ClassVar[bool] = True
    #: Whether all training batches have the same shape, as a CUDA graph needs it.
    static: ClassVar[bool] = True
    #: Where the data comes from, if it can be fetched.
    dataset: ClassVar[Dataset | None] = None

    @property
    @abstractmethod
    def recipes(self) -> Mapping[str, Recipe]:
        """By name: "short", and "paper" where the paper has one."""

    @property
    def keep(self) -> Sequence[str]:
        """Patterns of the layers that stay full-rank in the hybrid model."""
        return ()

    @property
    def carries(self) -> int:
        """So many of a training batch's last tensors are written by `loss` and go on into the next batch.

        They belong into a checkpoint that is taken in the middle of an epoch.
        """
        return 0

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model on the CPU, random numbers from the global generator."""

    @abstractmethod
    def load(self, folder: Path | None) -> Any:
        """The data, from `folder` or $PUFFERFISH_DATA; a ValueError says what is missing, or wrong in which file."""

    @abstractmethod
    def steps(self, data: Any, batch: int) -> int:
        """Updates in an epoch."""

    def batches(self, data: Any, split: str, batch: int, **which: Any) -> Iterator[Batch]:
        """One epoch of "train" (shuffled, augmented), "valid" or "test" (in order, all of it).

        Args:
            data: what `load` gave.
            batch: rows of all workers together.
            which: device, generator, rank, size, start: see `Epoch`.
        """
        return self.epoch(data, Epoch(split, batch, **which))

    @abstractmethod
    def epoch(self, data: Any, of: Epoch) -> Iterator[Batch]:
        """The same, for tasks to say how. The workers together get the same rows for any number of them."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        """What is minimised; the mean over the workers is that of the whole batch."""

    @abstractmethod
    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: torch.device | str = "cpu", batch: int = 256
    ) -> dict[str, float]:
        """Figures of all of a split, `self.measure` among them. The model's mode is as before afterwards."""

    def recipe(self, name: str) -> Recipe:
        """The recipe of that name."""
        if name not in self.recipes:
            raise ValueError(f"{self.name} has no recipe {name!r}; it has {', '.join(self.recipes)}")
        return self.recipes[name]


def known(task: str, what: str, value: str, among: Sequence[str]) -> None:
    """Refuse a setting that is not one of `among`."""
    if value not in among:
        close = difflib.get_close_matches(value, among, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{task} has no {what} {value!r}{hint}; it has {', '.join(among)}")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode and without gradients; the old mode afterwards.

    It comes out of DDP and the like: their forward waits for the other workers, and one alone may want to evaluate.
    """
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield unwrap(model)
    finally:
        model.train(before)
