"""`Task`: a model, its data and the recipes to train it."""

import contextlib
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...layers.names import unwrap
from ..data.batches import BatchOrder, Device
from ..data.dataset import Dataset
from .recipe import Recipe

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
