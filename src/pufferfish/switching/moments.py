"""When the full-rank warm-up ends: at a stated moment, or when the ranks have settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a training run is, as its loop states it. `total` counts what is given: epochs, else steps."""

    epoch: int | None = None
    step: int | None = None
    total: int | None = None

    def fraction(self, asks: object) -> float:
        """How much of the run is over."""
        now = self.step if self.epoch is None else self.epoch
        if now is None or not self.total:
            raise ValueError(f"{asks}: switch.step needs epoch= or step=, and total= in the same unit")
        return now / self.total

    def __str__(self) -> str:
        """
        >>> print(Position(epoch=3, step=120, total=90))
        epoch 3, step 120
        """
        given = {"epoch": self.epoch, "step": self.step}
        return ", ".join(f"{unit} {now}" for unit, now in given.items() if now is not None)


@dataclass(frozen=True)
class AtEpoch:
    """From epoch `n` on, counted from 0.

    >>> AtEpoch(80)(Position(epoch=79)), AtEpoch(80)(Position(epoch=80))
    (False, True)
    """

    n: int

    def __call__(self, at: Position) -> bool:
        if at.epoch is None:
            raise ValueError(f"{self}: switch.step needs epoch=")
        return at.epoch >= self.n


@dataclass(frozen=True)
class AtStep:
    """From step `n` on, counted from 0."""

    n: int

    def __call__(self, at: Position) -> bool:
        if at.step is None:
            raise ValueError(f"{self}: switch.step needs step=")
        return at.step >= self.n


@dataclass(frozen=True)
class AtFraction:
    """Once this share of the run is over.

    >>> AtFraction(0.1)(Position(epoch=3, total=30))
    True
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"AtFraction: {self.share} is not between 0 and 1")

    def __call__(self, at: Position) -> bool:
        return at.fraction(self) >= self.share


@dataclass(frozen=True, kw_only=True)
class RanksSettle:
    """Cuttlefish: when the layers' stable ranks, smoothed, have stopped moving; at the latest at `latest`.

    They are looked at every `every` epochs (or steps, where the loop states steps). The defaults are the
    authors' for CIFAR; for ImageNet they take window 5, span 5, tolerance 0.33.
    """

    every: int = 1
    window: int = 15  # of the moving average; shorter → follows faster
    span: int = 11  # how many changes in a row must be small; shorter → switches earlier
    tolerance: float = 0.1  # their mean size; larger → switches earlier
    latest: Callable[[Position], bool] = field(default=AtFraction(0.5))

    def due(self, at: Position) -> bool:
        """Whether this is a moment to look."""
        now = at.step if at.epoch is None else at.epoch
        if now is None:
            raise ValueError("RanksSettle: switch.step needs epoch= or step=")
        return now % self.every == 0

    def settled(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Whether stable ranks, one mapping an observation, are flat.

        >>> still = [{"fc": 12.0}] * 12
        >>> RanksSettle().settled(still), RanksSettle().settled(still[:11])
        (True, False)
        """
        if len(history) <= self.span:
            return False
        weight = 2 / (self.window + 1)
        average = dict(history[0])
        changes = []
        for seen in history[1:]:
            before = average
            average = {name: (1 - weight) * before[name] + weight * seen[name] for name in before}
            changes.append(sum(abs(average[n] - before[n]) for n in before) / max(len(before), 1))
        return sum(changes[-self.span :]) / self.span <= self.tolerance


When = Callable[[Position], bool]


def moment_text(when: object) -> str:
    """A moment in words that are the same in every process: functions print with their address.

    >>> moment_text(AtEpoch(3)), moment_text(all)
    ('AtEpoch(n=3)', 'all')
    """
    return str(getattr(when, "__qualname__", None) or repr(when))
