"""`Task`: a model, its data and the recipes to train it."""

from __future__ import annotations

import contextlib
import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...layers.names import unwrap
from ..data.batches import BatchOrder, Device
from ..data.dataset import Dataset

Batch = tuple[Tensor, ...]


class Task(ABC):
    """Base class of tasks. An instance holds the task's options; `load` reads the data.

    The `repr` identifies the task in records and when a run is resumed, so it must not change between processes.
    """

    name: str
    #: Key of the main figure in the result of `evaluate`.
    metric: str
    #: Whether a larger metric is better.
    higher_is_better: bool = True
    #: What the "test" split is: "test" data, or the "validation" data where there is no other.
    final_data: str = "test"
    #: Whether all training batches have the same shapes, as a CUDA graph and `accumulate` require.
    static_shapes: ClassVar[bool] = True
    #: Files that `pufferfish fetch` can download.
    dataset: ClassVar[Dataset | None] = None
    #: Number of tensors at the end of a training batch that `loss` updates in place for the next batch.
    #: Such tensors, e.g. the hidden state of an LSTM, are saved in checkpoints within an epoch.
    carried_tensors: ClassVar[int] = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    @abstractmethod
    def recipes(self) -> Mapping[str, Recipe]:
        """Recipes by name: "short", and "paper" if the paper has one."""

    @property
    def keep(self) -> Sequence[str]:
        """Patterns of the layers that stay full-rank in the hybrid model."""
        return ()

    @property
    def source(self) -> tuple[str, str] | None:
        """Name and text of the user's file that the task comes from; None for a task of the package."""
        return None

    @property
    def builder(self) -> Callable[..., nn.Module]:
        """The function that builds the model; its arguments say whether the model can be narrower."""
        return self.build

    @abstractmethod
    def build(self) -> nn.Module:
        """Create a model on the CPU, initialized from the global random generator.

        A task whose `build` also takes `width: float = 1.0`, a factor on the sizes of all hidden layers, can be trained
        with the method `narrow`.
        """

    @abstractmethod
    def load(self, folder: Path | None) -> Any:
        """Load the data from `folder` or $PUFFERFISH_DATA; raise ValueError if a file is missing or damaged."""

    @abstractmethod
    def steps(self, data: Any, batch: int) -> int:
        """Number of updates in an epoch."""

    def batches(self, data: Any, split: str, batch: int, **order: Any) -> Iterator[Batch]:
        """One epoch of "train" (shuffled and augmented), "valid" or "test" (in order and complete).

        `data` is the result of `load`; `batch` is the global batch size, over all workers; `order` are
        further arguments of `BatchOrder`.
        """
        return self.epoch(data, BatchOrder(split, batch, **order))

    @abstractmethod
    def epoch(self, data: Any, order: BatchOrder) -> Iterator[Batch]:
        """Implement `batches`. The union of all workers' rows must not depend on the number of workers."""

    def check(self, model: nn.Module, data: Any, device: Device) -> None:  # noqa: B027, most tasks fit
        """Raise ValueError if the model does not fit the data. Called before training; leaves the model unchanged."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        """Training loss; its mean over the workers must equal the loss of the global batch."""

    @abstractmethod
    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: Device = "cpu", batch: int = 256
    ) -> dict[str, float]:
        """Figures of a whole split, including `self.metric`. The model's training mode is restored afterwards."""

    def recipe(self, text: str, *, epochs: int | None = None, batch: int | None = None) -> Recipe:
        """Recipe by name, also with other values: `short,rank=0.33,optimizer=muon`; see `Recipe.changed`."""
        name, _, changes = text.partition(",")
        if name not in self.recipes:
            raise ValueError(f"{self.name} has no recipe {name!r}; choose from {', '.join(self.recipes)}")
        try:
            return self.recipes[name].changed(changes, epochs=epochs, batch=batch)
        except ValueError as error:
            raise ValueError(f"recipe {text!r}: {error}") from None


def check_choice(task: str, option: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError if `value` is not one of `choices`."""
    if value not in choices:
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{task} has no {option} {value!r}{hint}; choose from {', '.join(choices)}")


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model in evaluation mode without gradients; restore its mode on exit.

    The model is unwrapped from DDP, whose forward would wait for the other workers, so that one worker can evaluate.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield unwrap(model)
    finally:
        model.train(training)


SCHEDULES = ("linear", "cosine", "steps", "inverse-sqrt", "plateau")
OPTIMIZERS = ("sgd", "adam", "adamw", "muon", "lars", "lamb", "sam")

#: Optimizers that use the same learning rates as another one.
_SAME_RATES = {"sam": "sgd", "adamw": "adam", "muon": "adam"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a training run; `dataclasses.asdict` converts it to JSON.

    After the warm-up, the schedules "linear" and "cosine" decay to `floor`, "steps" multiplies by 0.1 at each
    of `milestones`, "inverse-sqrt" decays with the square root of the step, and "plateau" is constant until
    the training loop multiplies it by `plateau` after an epoch without improvement in validation.

    >>> short = Recipe(epochs=10, batch=32, lr=0.4, warm_up=0.2)
    >>> [round(short.lr_at(step, 10), 2) for step in (0, 1, 2, 6, 9)]
    [0.2, 0.4, 0.4, 0.2, 0.05]
    """

    epochs: int
    batch: int  # global batch size, over all workers
    lr: float  # peak learning rate; see `lr_at`
    schedule: str = "linear"
    warm_up: float = (
        0.0  # fraction of the run in which lr rises linearly from 0; above 1 it never reaches `lr`
    )
    floor: float = 0.0  # final learning rate as a fraction of `lr`
    milestones: tuple[float, ...] = ()  # fractions of the run
    plateau: float = 0.25  # factor of the "plateau" schedule
    optimizer: str = "sgd"  # or "adam", "adamw", "muon" (with AdamW), "lars", "lamb", "sam" (with SGD)
    momentum: float = 0.9  # for SGD, LARS and SAM
    nesterov: bool = False  # for SGD, LARS and SAM
    betas: tuple[float, float] = (0.9, 0.999)  # for Adam, AdamW (also beside Muon) and LAMB
    trust: float = 0.01  # trust coefficient η of LARS
    rho: float = 0.05  # neighborhood size ρ of SAM
    weight_decay: float = 0.0  # of matrices and filters
    decay_vectors: bool = False  # apply `weight_decay` to vectors, too
    label_smoothing: float = 0.0  # as in `torch.nn.functional.cross_entropy`
    clip: float | None = None  # maximum gradient norm; None disables clipping
    switch_at: int | None = None  # epochs of full-rank warm-up
    switch_lr: float = 1.0  # factor on the learning rate after the switch
    rank: float = 0.25  # fraction of the full rank after the switch

    def __post_init__(self) -> None:
        checks = {
            "epochs": (self.epochs >= 1, "1 or more"),
            "batch": (self.batch >= 1, "1 or more"),
            "lr": (0 < self.lr < math.inf, "a positive number"),
            "schedule": (self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            "optimizer": (self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
            "trust": (self.trust > 0, "a positive number"),
            "rho": (self.rho > 0, "a positive number"),
            "warm_up": (self.warm_up >= 0, "a fraction of the run, 0 or more"),
            "floor": (0 <= self.floor <= 1, "a fraction of lr, between 0 and 1"),
            "label_smoothing": (0 <= self.label_smoothing < 1, "between 0 and 1"),
            "clip": (self.clip is None or self.clip > 0, "a positive number or None"),
        }
        for name, (valid, requirement) in checks.items():
            if not valid:
                raise ValueError(f"Recipe: {name}={getattr(self, name)!r} must be {requirement}")
        if self.schedule == "inverse-sqrt" and not self.warm_up:
            raise ValueError("Recipe: schedule='inverse-sqrt' needs warm_up > 0")

    def changed(self, text: str, *, epochs: int | None = None, batch: int | None = None) -> Recipe:
        """Return a copy with the values of a text such as `optimizer=muon,rank=0.33`.

        With other epochs, `switch_at` is scaled, unless the text sets it. `epochs` and `batch` take precedence over those
        of the text.

        >>> Recipe(epochs=12, batch=32, lr=0.1, switch_at=4).changed("epochs=6,nesterov=true,clip=none").switch_at
        2
        >>> Recipe(epochs=12, batch=32, lr=0.1).changed("rate=1")
        Traceback (most recent call last):
        ValueError: 'rate=1' is not a value of a recipe; choose from epochs, batch, lr, schedule, ...
        """
        kinds = {f.name: str(f.type) for f in fields(self) if not str(f.type).startswith("tuple")}
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise ValueError(f"{part!r} is not a value of a recipe; choose from {', '.join(kinds)}")
            values[name] = _parse_value(kinds[name], part, value)
        given = {"epochs": epochs, "batch": batch}
        values |= {name: value for name, value in given.items() if value is not None}
        if self.switch_at and "epochs" in values:
            values.setdefault("switch_at", max(round(self.switch_at * values["epochs"] / self.epochs), 1))
        if "optimizer" in values:
            values["lr"] = self.with_optimizer(values["optimizer"], values.get("lr")).lr
        return replace(self, **values)

    def with_optimizer(self, name: str, lr: float | None = None) -> Recipe:
        """Return the recipe with another optimizer and learning rate.

        Args:
            lr: required if the recipe's learning rate does not fit the optimizer.

        >>> Recipe(epochs=1, batch=1, lr=0.1).with_optimizer("sam").lr
        0.1
        >>> Recipe(epochs=1, batch=1, lr=0.1).with_optimizer("lars")
        Traceback (most recent call last):
        ValueError: optimizer lars: give its lr, too, as in dense(optimizer=lars,lr=1.6); the recipe's 0.1 is for sgd, ...
        """
        changed = replace(self, optimizer=name, lr=self.lr if lr is None else lr)
        if lr is None and _SAME_RATES.get(name, name) != _SAME_RATES.get(self.optimizer, self.optimizer):
            raise ValueError(
                f"optimizer {name}: give its lr, too, as in dense(optimizer={name},lr=1.6); the recipe's {self.lr:g} is for "
                f"{self.optimizer}, whose rates have another scale"
            )
        return changed

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of update `step`, counted from 0, in a run of `steps` updates."""
        warm_up = self.warm_up * steps
        up = min((step + 1) / warm_up, 1.0) if warm_up else 1.0
        past = (step - warm_up) / max(steps - warm_up, 1.0)  # fraction of the run after the warm-up
        if self.schedule == "linear":
            factor = min(up, self.floor + (1 - self.floor) * (1 - max(past, 0.0)))
        elif self.schedule == "cosine":
            factor = min(up, self.floor + (1 - self.floor) * (1 + math.cos(math.pi * max(past, 0.0))) / 2)
        elif self.schedule == "steps":
            factor = up * 0.1 ** sum(step >= milestone * steps for milestone in self.milestones)
        elif self.schedule == "inverse-sqrt":
            factor = min(up, math.sqrt(warm_up / (step + 1)))
        else:
            factor = up
        return self.lr * factor


def _parse_value(kind: str, part: str, text: str) -> Any:
    """A value of the type that `kind` names."""
    kind, *optional = kind.split(" | ")
    if kind == "str":
        return text
    if optional and text == "none":
        return None
    if kind == "bool" and text in ("true", "false"):
        return text == "true"
    try:
        return int(text) if kind == "int" else float(text if kind == "float" else "")
    except ValueError:
        known = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise ValueError(f"{part!r}: must be {known}{' or none' * bool(optional)}") from None
