"""Pruning as a `ModelChange`, by lottery tickets or Early-Bird tickets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...checkpoint.files import SavedCheckpoint
from ...checkpoint.folder import newest_checkpoint
from ...distributed.ddp import Job
from ...layers import low_rank_type
from ...layers.names import named_modules
from ...lowrank.optimizers import Optimizers
from ...measure import RunLog
from ...planning.profile import Example, profile
from ..method_name import PruningMethod
from ..model_change import ModelChange
from .early_bird import EarlyBird
from .lottery_ticket import LotteryTicket


class PruningChange(ModelChange):
    """A `ModelChange` by pruning; a checkpoint saves its state as the scheduler."""

    pruner: Any  # has state_dict and load_state_dict

    @property
    def checkpoint_parts(self) -> dict[str, Any]:
        return {"scheduler": self}

    def restore(self, folder: Path) -> None:
        state = Job(self.model).workers.run_on_all(lambda: saved_pruning_state(folder))
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the pruner's state."""
        state: dict[str, Any] = self.pruner.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the pruner's state; removes the channels that its model had lost."""
        self.pruner.load_state_dict(state)


class LotteryTicketChange(PruningChange):
    """Rounds of a recipe's epochs with a `LotteryTicket`, rewound to the end of the first epoch.

    Args:
        epochs: of the first round; later rounds start at the rewound epoch.
        rounds: as in `LotteryTicket`.

    >>> import torch
    >>> model = nn.Linear(8, 8)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> change = LotteryTicketChange(model, sgd, epochs=4, steps_per_epoch=10, rounds=2)
    >>> change.epochs, change.schedule_position(39), change.schedule_position(40)
    (10, (39, 40), (10, 40))
    """

    pruner: LotteryTicket

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, *, epochs: int, steps_per_epoch: int, rounds: int
    ) -> None:
        self._rewind_epoch = 1 if epochs > 1 else 0
        self._first_epochs, self._later_epochs = epochs, epochs - self._rewind_epoch  # of a round
        total = epochs + rounds * self._later_epochs
        super().__init__(model, epochs=total, steps_per_epoch=steps_per_epoch)
        rewind = self._rewind_epoch * steps_per_epoch
        self.pruner = LotteryTicket(model, optimizer, rounds=rounds, rewind=rewind)

    @property
    def parameters(self) -> int:
        return super().parameters - self.pruner.total + self.pruner.weights

    @property
    def summary(self) -> str:
        pruner = self.pruner
        left = f"{pruner.weights:,} of {pruner.total:,} weights left"
        return f"Lottery ticket, round {pruner.round} of {pruner.rounds}: {left}"

    def begin_epoch(self, epoch: int) -> bool:
        changed = False
        while self.pruner.round < self._round(epoch):
            changed = self.pruner.next_round()
        return changed

    def after_step(self) -> None:
        self.pruner.step()

    def schedule_position(self, step: int) -> tuple[int, int]:
        repeated = self._round(step // self.steps_per_epoch) * self._later_epochs
        return step - repeated * self.steps_per_epoch, self._first_epochs * self.steps_per_epoch

    def forward_macs(self, example: Example) -> int:
        """Return the MACs of a forward pass without multiplications by zero weights."""
        return nonzero_macs(self.model, example)

    def results(self, log: RunLog) -> dict[str, Any]:
        trainings = [{"weights": r.weights, "steps": r.steps} for r in self.pruner.trained()]
        return super().results(log) | {"epochs": self.epochs, "trainings": trainings}

    def _round(self, epoch: int) -> int:
        return max(0, (epoch - self._rewind_epoch) // self._later_epochs)


class EarlyBirdChange(PruningChange):
    """An `EarlyBird` ticket in a recipe's epochs, drawn in the middle of the run at the latest."""

    pruner: EarlyBird

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, *, epochs: int, steps_per_epoch: int, ratio: float
    ) -> None:
        if epochs < 2:
            raise ValueError(
                f"early-bird: a ticket is drawn between epochs, so at least 2 are needed, not {epochs}"
            )
        super().__init__(model, epochs=epochs, steps_per_epoch=steps_per_epoch)
        self.pruner = EarlyBird(model, optimizer, ratio=ratio, latest=epochs // 2)

    @property
    def summary(self) -> str:
        return str(self.pruner.ticket or "No Early-Bird ticket was drawn")

    def begin_epoch(self, epoch: int) -> bool:
        return self.pruner.begin_epoch(epoch)

    def results(self, log: RunLog) -> dict[str, Any]:
        ticket = self.pruner.ticket
        return super().results(log) | {"epochs": self.epochs, "drawn_after": ticket and ticket.epoch}


def saved_pruning_state(folder: Path) -> dict[str, Any] | None:
    """Return the state in the newest checkpoint in `folder`; None without a checkpoint."""
    newest = newest_checkpoint(folder, "raise") if folder.is_dir() else None
    if newest is None:
        return None
    state: dict[str, Any] | None = SavedCheckpoint(Path(newest[0])).training["parts"].get("scheduler")
    return state


def build_pruning_change(
    method: PruningMethod, model: nn.Module, optimizer: Optimizers, *, epochs: int, steps_per_epoch: int
) -> PruningChange:
    """Build the change of a pruning method, for a recipe of `epochs`."""
    length = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
    if method.ratio is None:
        return LotteryTicketChange(model, optimizer, **length, rounds=method.rounds)
    return EarlyBirdChange(model, optimizer, **length, ratio=method.ratio)


def nonzero_macs(model: nn.Module, example: Example) -> int:
    """Count forward MACs without multiplications by zero weights, which common hardware does not skip.

    >>> import torch
    >>> layer = nn.Linear(4, 2, bias=False)
    >>> _ = layer.weight.data[0].zero_()
    >>> nonzero_macs(layer, torch.ones(3, 4))
    12
    """
    calls = profile(model, example).calls
    total = 0
    for name, _, module in named_modules(model):
        kind = low_rank_type(type(module))
        if kind is not None and name in calls:
            for x in (x for x in kind.matrices(module) if not x.lookup):
                weights = module.get_parameter(x.weight).detach()[x.index]
                used = int(weights.count_nonzero()) * x.used_blocks // x.blocks
                total += used * calls[name].positions[x.name]
    return total
