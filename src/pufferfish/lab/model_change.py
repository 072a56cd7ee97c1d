"""`ModelChange`: a change of the model between epochs, as a training loop sees it: none, low rank, or pruning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.ddp import find_ddp
from ..layers.names import unwrap
from ..lowrank.factorize import merge_, ranks_of
from ..lowrank.frobenius_decay import FrobeniusDecay
from ..measure import RunLog
from ..planning.profile import Example, profile
from ..switching.moments import AtStep, RanksSettle
from ..switching.switch import Switch
from .tasks import Batch, Recipe, Task
from .tasks.task import eval_mode

if TYPE_CHECKING:
    from .train.step import RunComponents

#: Rows that are counted at once: sentences differ in length, and batch norms need several rows.
ROWS = 8


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


class LowRankChange(ModelChange):
    """Switches the model to low rank at the moment that a `Switch` chooses, and back if it says so.

    Args:
        frobenius: strength of the Frobenius decay; 0: none.
    """

    def __init__(
        self, components: RunComponents, switch: Switch, steps_per_epoch: int, frobenius: float = 0.0
    ) -> None:
        epochs = components.settings.recipe.epochs
        super().__init__(components.model, epochs=epochs, steps_per_epoch=steps_per_epoch)
        self.switch, self.optimizer, self.replicas = switch, components.optimizer, components.replicas
        self._components: RunComponents | None = components  # until the first epoch
        if frobenius:
            FrobeniusDecay(components.model, components.optimizer, frobenius)
            for replica in components.replicas:
                FrobeniusDecay(replica.module, replica.optimizer, frobenius)

    @property
    def checkpoint_parts(self) -> dict[str, Any]:
        return {"switch": self.switch}

    @property
    def summary(self) -> str:
        text = str(self.switch.report or "The model did not become low-rank").splitlines()[0]
        # A run counts its epochs from 1, a switch from 0: epoch 3 of a switch begins after epoch 3 of the run.
        text = text.replace(" at epoch 0:", " before epoch 1, without a warm-up:")
        return text.replace(" at epoch ", " after epoch ")

    def restore_replica(self, module: nn.Module, optimizer: Any) -> None:
        if self.switch.low_rank:
            Switch(lr=self.switch.lr).restore_(module, optimizer, self.switch.state_dict())

    def begin_epoch(self, epoch: int) -> bool:
        if isinstance(self.switch.when, RanksSettle) and self.switch.report is None:
            self.sync()  # it looks at the weights
        group = None if find_ddp(self.model) is not None else dist.group.WORLD  # None in a single process
        if not self.switch.due(self.model, epoch=epoch, total=self.epochs, group=group):
            self._show_inputs()
            return False
        self.sync()
        changed = self.switch.step(self.model, self.optimizer, epoch=epoch, total=self.epochs, group=group)
        if changed and self.switch.report is not None:
            for replica in self.replicas:  # of the same weights, so that the factors are the same
                if not self.switch.low_rank:
                    merge_(replica.module, replica.optimizer)
                    continue
                switch = Switch(self.switch.report.plan, when=AtStep(0), lr=self.switch.lr)
                switch.step(replica.module, replica.optimizer, step=0)
        return changed

    def _show_inputs(self) -> None:
        """Run the model once before it is compiled, so that the switch sees which layers share an input.

        The hooks for that are then gone. Otherwise the first validation would remove them, and the model be compiled again.
        """
        c, self._components = self._components, None
        if c is None or not c.settings.compile:
            return
        batch = few_rows(c.task, c.settings.recipe, c.data, c.device)
        with self.untimed(), eval_mode(c.model) as module, c.settings.autocast:
            c.task.loss(module, batch, c.settings.recipe)

    def log_change(self, log: RunLog, step: int) -> None:
        assert self.switch.report is not None
        log.log(step=step, epoch=step / self.steps_per_epoch, **self.switch.report.metrics)
        if self.switch.low_rank:
            log.describe(layers=[
                {"name": e.name, "shape": list(e.shape), "rank": e.rank, "full_rank": e.matrix.full_rank}
                for e in self.switch.report.plan.entries
                if e.matrix is not None
            ])  # fmt: skip

    def results(self, log: RunLog) -> dict[str, Any]:
        report = self.switch.report
        found = super().results(log) | {"low_rank_updates": self._low_rank_updates()}
        if report is not None:
            found["low_rank_parameters"] = report.plan.after.parameters
            found["shared_inputs"] = [list(names) for names in report.plan.shared_inputs]
        return found

    def _low_rank_updates(self) -> int:
        """Updates of the low-rank model."""
        report = self.switch.report
        if report is None or report.position.epoch is None or not report.plan.ranks:
            return 0
        end = report.merged.epoch if report.merged is not None else None
        return ((self.epochs if end is None else end) - report.position.epoch) * self.steps_per_epoch


def build_model_change(components: RunComponents, steps_per_epoch: int) -> ModelChange:
    """Build the change of the model that the run's method asks for; raises ValueError for an unsupported model."""
    method, recipe = components.settings.method, components.settings.recipe
    if method.pruning is not None:
        from .rivals.pruning import build_pruning_change

        return build_pruning_change(
            method.pruning, components.model, components.optimizer,
            epochs=recipe.epochs, steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
    if method.low_rank is not None:
        switch = method.low_rank.switch(recipe, components.task.keep)
        if not method.low_rank.automatic:
            # Patterns that match nothing, and plans that do not fit, are errors before the run has a folder.
            method.low_rank.make_plan(unwrap(components.model), recipe, components.task.keep)
        return LowRankChange(components, switch, steps_per_epoch, method.low_rank.frobenius)
    return ModelChange(components.model, epochs=recipe.epochs, steps_per_epoch=steps_per_epoch)


def few_rows(task: Task, recipe: Recipe, data: Any, device: torch.device) -> Batch:
    """A small batch of training data, the same rows for all methods."""
    generator = torch.Generator().manual_seed(0)
    return next(task.batches(data, "train", min(ROWS, recipe.batch), device=device, generator=generator))
