"""`Rival`: a ticket in a training loop. The two there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...checkpoint import checkpoint_folder as folders
from ...checkpoint.checkpoint_files import Saved
from ...measure import RunLog
from ...optim.carry import Optimizers
from ...planning.profile import Example
from ...switching.job import Job
from .early_bird import EarlyBird
from .lottery_ticket import LotteryTicket
from .model_change import Change
from .round_cost import nonzero_macs


class Rival(Change):
    """A `Change` by a ticket, which a checkpoint keeps as its scheduler."""

    ticket: Any  # what is asked for its state_dict

    @property
    def kept(self) -> dict[str, Any]:
        return {"scheduler": self}

    def restore(self, folder: Path) -> None:
        state = Job(self.model).workers.together(lambda: saved_in(folder))
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The ticket's."""
        state: dict[str, Any] = self.ticket.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into the ticket; channels that were removed then are gone here, too."""
        self.ticket.load_state_dict(state)


class LotteryRun(Rival):
    """Lottery tickets by rounds of a recipe's epochs, rewound to the end of the first one.

    Args:
        epochs: of the first round; the others start where they are rewound to.
        rounds, settings: as in `LotteryTicket`.

    >>> import torch
    >>> model = nn.Linear(8, 8)
    >>> run = LotteryRun(model, torch.optim.SGD(model.parameters(), lr=0.1), epochs=4, an_epoch=10, rounds=2)
    >>> run.epochs, run.schedule(39), run.schedule(40)
    (10, (39, 40), (10, 40))
    """

    ticket: LotteryTicket

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        epochs: int,
        an_epoch: int,
        rounds: int,
        **settings: Any,
    ) -> None:
        self._skipped = 1 if epochs > 1 else 0  # the epochs that later rounds take over
        self._first, self._later = epochs, epochs - self._skipped
        super().__init__(model, epochs=epochs + rounds * self._later, an_epoch=an_epoch)
        rewind = self._skipped * an_epoch
        self.ticket = LotteryTicket(model, optimizer, rounds=rounds, rewind=rewind, **settings)

    @property
    def parameters(self) -> int:
        return super().parameters - self.ticket.total + self.ticket.weights

    @property
    def report(self) -> str:
        ticket = self.ticket
        left = f"{ticket.weights:,} of {ticket.total:,} weights left"
        return f"Lottery ticket, round {ticket.round} of {ticket.rounds}: {left}"

    def begin_epoch(self, epoch: int) -> bool:
        changed = False
        while self.ticket.round < self._round(epoch):
            changed = self.ticket.next_round()
        return changed

    def after_step(self) -> None:
        self.ticket.step()

    def schedule(self, step: int) -> tuple[int, int]:
        repeated = self._round(step // self.an_epoch) * self._later
        return step - repeated * self.an_epoch, self._first * self.an_epoch

    def macs(self, example: Example) -> int:
        """Without those that multiply with zero."""
        return nonzero_macs(self.model, example)

    def results(self, log: RunLog) -> dict[str, Any]:
        trainings = [{"weights": r.weights, "steps": r.steps} for r in self.ticket.cost().rounds]
        return super().results(log) | {"epochs": self.epochs, "trainings": trainings}

    def _round(self, epoch: int) -> int:
        return max(0, (epoch - self._skipped) // self._later)


class EarlyBirdRun(Rival):
    """Early-Bird tickets in a recipe's epochs; drawn in the middle of the run at the latest."""

    ticket: EarlyBird

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        epochs: int,
        an_epoch: int,
        ratio: float,
        **settings: Any,
    ) -> None:
        if epochs < 2:
            raise ValueError(f"early-bird: a ticket is drawn between epochs, and {epochs} has no such place")
        super().__init__(model, epochs=epochs, an_epoch=an_epoch)
        self.ticket = EarlyBird(model, optimizer, ratio=ratio, **({"latest": epochs // 2} | settings))

    @property
    def report(self) -> str:
        return str(self.ticket.ticket or "No Early-Bird ticket was drawn").splitlines()[0]

    def begin_epoch(self, epoch: int) -> bool:
        return self.ticket.begin_epoch(epoch)

    def results(self, log: RunLog) -> dict[str, Any]:
        drawn = self.ticket.ticket
        return super().results(log) | {"epochs": self.epochs, "drawn_after": drawn and drawn.epoch}


def saved_in(folder: Path) -> dict[str, Any] | None:
    """The state of the rival in the newest checkpoint there; None if there is none."""
    found = folders.newest(folder, "raise") if folder.is_dir() else None
    if found is None:
        return None
    state: dict[str, Any] | None = Saved(Path(found[0])).training["parts"].get("scheduler")
    return state
