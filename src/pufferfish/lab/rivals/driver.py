"""`Rival`: what a training loop asks of a way to train that changes the model between epochs. And the two there are.

The loop goes over `epochs` (a lottery's rounds follow one another), calls `begin_epoch` and `after_step`, and takes its
learning rate at `schedule(step)`:

    rival = make("early-bird-0.5", model, optimizer, epochs=recipe.epochs, an_epoch=an_epoch)
    for epoch in range(rival.epochs):
        changed = rival.begin_epoch(epoch)      # captured graphs and what holds old parameters are made anew
        for step in range(epoch * an_epoch, (epoch + 1) * an_epoch):
            lr = recipe.rate(*rival.schedule(step))
            ...
            rival.after_step()

Given to `Checkpoint(scheduler=rival)` it is saved with the rest. Channels that were removed must be gone before weights
are loaded: `saved_in(folder)` looks, `rival.load_state_dict` removes them, then `Checkpoint.resume` does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from ...checkpoint import folders
from ...checkpoint.saved import Saved
from ...names import unwrap
from ...optim import Optimizers
from .earlybird import EarlyBird
from .lottery import LotteryTicket

#: Each with what a number after it means, as in early-bird-0.3.
RIVALS = {"lottery-ticket": "rounds of pruning", "early-bird": "the share of channels to remove"}


class Rival(Protocol):
    """A way to train that may change the model between epochs."""

    epochs: int  # to train in all

    @property
    def parameters(self) -> int:
        """Those that are left."""

    @property
    def report(self) -> str:
        """What has become of the model, in a line."""

    def begin_epoch(self, epoch: int) -> bool:
        """At the start of every epoch, on every rank: whether the model or the optimizer's state is another now."""

    def after_step(self) -> None:
        """After every update."""

    def schedule(self, step: int) -> tuple[int, int]:
        """At which update of how many the learning rate's schedule is."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def is_rival(word: str) -> bool:
    """Whether `word` names one; a ValueError if it does with a number that makes no sense.

    >>> is_rival("early-bird-0.3"), is_rival("lottery-ticket"), is_rival("pufferfish")
    (True, True, False)
    """
    return _parsed(word) is not None


def make(word: str, model: nn.Module, optimizer: Optimizers, *, epochs: int, an_epoch: int) -> Rival:
    """The rival of that name for a recipe of `epochs` of `an_epoch` updates: "lottery-ticket-9", "early-bird-0.5"."""
    parsed = _parsed(word)
    if parsed is None:
        raise ValueError(f"{word!r} is none of {', '.join(RIVALS)}")
    name, number = parsed
    if name == "lottery-ticket":
        return LotteryRun(model, optimizer, epochs=epochs, an_epoch=an_epoch, rounds=int(number or 5))
    return EarlyBirdRun(model, optimizer, epochs=epochs, an_epoch=an_epoch, ratio=number or 0.5)


def saved_in(folder: Path) -> dict[str, Any] | None:
    """The state of the rival in the newest checkpoint there; None if there is none."""
    found = folders.newest(folder, "raise") if folder.is_dir() else None
    state: dict[str, Any] | None = (
        None if found is None else Saved(Path(found[0])).training["parts"].get("scheduler")
    )
    return state


class LotteryRun:
    """Lottery tickets by rounds of a recipe's epochs, rewound to the end of the first one.

    Args:
        epochs: of the first round; the others start where they are rewound to.
        an_epoch: updates in one.
    """

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
        rewind = self._skipped * an_epoch
        self.ticket = LotteryTicket(model, optimizer, rounds=rounds, rewind=rewind, **settings)
        self._first, self._an_epoch = epochs, an_epoch
        self.epochs = epochs + rounds * (epochs - self._skipped)

    @property
    def parameters(self) -> int:
        whole = sum(p.numel() for p in unwrap(self.ticket.model).parameters())
        return whole - self.ticket.total + self.ticket.weights

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
        later = max(self._round(step // self._an_epoch), 0)
        return step - later * (self._first - self._skipped) * self._an_epoch, self._first * self._an_epoch

    def state_dict(self) -> dict[str, Any]:
        return self.ticket.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ticket.load_state_dict(state)

    def _round(self, epoch: int) -> int:
        return max(0, (epoch - self._skipped) // (self._first - self._skipped))


class EarlyBirdRun:
    """Early-Bird tickets in a recipe's epochs; drawn in the middle of the run at the latest."""

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
        self.epochs, self._an_epoch = epochs, an_epoch
        self.bird = EarlyBird(model, optimizer, ratio=ratio, **({"latest": max(epochs // 2, 1)} | settings))

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in unwrap(self.bird.model).parameters())

    @property
    def report(self) -> str:
        return str(self.bird.ticket or "No Early-Bird ticket was drawn").splitlines()[0]

    def begin_epoch(self, epoch: int) -> bool:
        return self.bird.begin_epoch(epoch)

    def after_step(self) -> None:
        """There is nothing to count."""

    def schedule(self, step: int) -> tuple[int, int]:
        return step, self.epochs * self._an_epoch

    def state_dict(self) -> dict[str, Any]:
        return self.bird.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bird.load_state_dict(state)


def _parsed(word: str) -> tuple[str, float | None] | None:
    found = re.fullmatch(rf"({'|'.join(RIVALS)})(?:-([\d.]+))?", word)
    if found is None:
        return None
    name, text = found.groups()
    if text is None:
        return name, None
    whole = name == "lottery-ticket"
    number = float(text) if re.fullmatch(r"\d*\.?\d+", text) else 0.0
    if not (number >= 1 and number.is_integer() if whole else 0 < number < 1):
        example = "lottery-ticket-5" if whole else "early-bird-0.5"
        raise ValueError(f"{word!r}: after {name}- come {RIVALS[name]}, as in {example}")
    return name, number
