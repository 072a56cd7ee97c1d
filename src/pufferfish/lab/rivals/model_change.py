"""`ModelChange`: a change of the model between epochs, as a training loop sees it: none, low rank, or pruning."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from ...layers.names import unwrap
from ...lowrank.rewrite import ranks_of
from ...measure import RunLog
from ...planning.profile import Example, profile


class ModelChange:
    """Leaves the model as it is; subclasses change it.

        change.restore(folder)                          # the checkpoints' folder, before `Checkpoint.resume`
        for epoch in range(change.epochs):
            changed = change.begin_epoch(epoch)         # if True, the model is another one
            for step in range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch):
                lr = recipe.lr_at(*change.schedule_position(step))
                ...
                change.after_step()

    Args:
        model: as the loop calls it.
        epochs: epochs of the recipe.

    Attributes:
        epochs: all epochs, including retraining.

    >>> change = ModelChange(nn.Linear(4, 2), epochs=3, steps_per_epoch=10)
    >>> change.epochs, change.begin_epoch(0), change.schedule_position(12), change.parameters
    (3, False, (12, 30), 10)
    """

    #: Context for work that is not training.
    untimed: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)
    #: Makes the models of all workers equal, which differ between the averages of local steps.
    sync: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, model: nn.Module, *, epochs: int, steps_per_epoch: int) -> None:
        self.model, self.epochs, self.steps_per_epoch = model, epochs, steps_per_epoch

    @property
    def checkpoint_parts(self) -> dict[str, Any]:
        """Arguments for `Checkpoint`."""
        return {}

    @property
    def summary(self) -> str:
        """One line about the change so far."""
        return ""

    @property
    def parameters(self) -> int:
        """Number of remaining parameters."""
        return sum(p.numel() for p in unwrap(self.model).parameters())

    def restore(self, folder: Path) -> None:
        """Give the model the structure that the weights of the newest checkpoint in `folder` need."""

    def restore_replica(self, module: nn.Module, optimizer: Any) -> None:
        """Give the model of another simulated worker the structure that a checkpoint gave this one."""

    def begin_epoch(self, epoch: int) -> bool:
        """Call at the start of every epoch, on every worker. True if the model or the optimizer's state was replaced."""
        return False

    def after_step(self) -> None:
        """Call after every update."""

    def schedule_position(self, step: int) -> tuple[int, int]:
        """Return the position in the learning-rate schedule: (update, number of updates)."""
        return step, self.epochs * self.steps_per_epoch

    def log_change(self, log: RunLog, step: int) -> None:
        """Record the change that `begin_epoch` has made, after `step` updates."""

    def forward_macs(self, example: Example) -> int:
        """Return the MACs of a forward pass."""
        return profile(self.model, example).forward_macs

    def results(self, log: RunLog) -> dict[str, Any]:
        """Return results for the run's records, at its end."""
        return {"parameters": self.parameters, "low_rank_layers": len(ranks_of(self.model))}
