"""`Change`: what may become of a model between epochs, as a training loop sees it: nothing, low rank, or a rival's pruning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from ...layers.names import unwrap
from ...lowrank.factorize import ranks_of
from ...measure import RunLog
from ...planning.profile import Example, profile


class Change:
    """Nothing: the model stays as it is. What changes it derives from this.

        change.restore(folder)                          # of checkpoints; then the checkpoint's own resume
        for epoch in range(change.epochs):
            changed = change.begin_epoch(epoch)         # what holds old parameters, such as a graph, is made anew
            for step in range(epoch * an_epoch, (epoch + 1) * an_epoch):
                lr = recipe.rate(*change.schedule(step))
                ...
                change.after_step()

    Args:
        model: as the loop calls it.
        epochs: of the recipe.
        an_epoch: updates in one.

    >>> change = Change(nn.Linear(4, 2), epochs=3, an_epoch=10)
    >>> change.epochs, change.begin_epoch(0), change.schedule(12), change.parameters
    (3, False, (12, 30), 10)
    """

    #: Around what is not training.
    aside: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    def __init__(self, model: nn.Module, *, epochs: int, an_epoch: int) -> None:
        self.model, self.an_epoch = model, an_epoch
        self.epochs = epochs  # to train in all

    @property
    def kept(self) -> dict[str, Any]:
        """What a `Checkpoint` is given."""
        return {}

    @property
    def report(self) -> str:
        """What has become of the model, in a line."""
        return ""

    @property
    def parameters(self) -> int:
        """Those that are left."""
        return sum(p.numel() for p in unwrap(self.model).parameters())

    def restore(self, folder: Path) -> None:
        """Before weights are loaded from the newest checkpoint there: the structure that they are for."""

    def begin_epoch(self, epoch: int) -> bool:
        """At the start of every epoch, on every rank: whether the model or the optimizer's state is another now."""
        return False

    def after_step(self) -> None:
        """After every update."""

    def schedule(self, step: int) -> tuple[int, int]:
        """At which update of how many the learning rate's schedule is."""
        return step, self.epochs * self.an_epoch

    def changed(self, log: RunLog) -> None:
        """Into the records: what has just become of the model."""

    def macs(self, example: Example) -> int:
        """Of a forward pass."""
        return profile(self.model, example).forward_macs

    def results(self, log: RunLog) -> dict[str, Any]:
        """At the end of the run, for its records."""
        return {"parameters": self.parameters, "low_rank_layers": len(ranks_of(self.model))}
