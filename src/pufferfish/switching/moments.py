"""Moments at which a `Switch` changes the model: at a given position, or when the ranks have settled."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position in a training run, as passed to `Switch.step`. `total` is in epochs if `epoch` is given, else in steps."""

    epoch: int | None = None
    step: int | None = None
    total: int | None = None

    @property
    def unit(self) -> int | None:
        """The epoch, or the step if `epoch` is not given."""
        return self.step if self.epoch is None else self.epoch

    def fraction(self, moment: object) -> float:
        """Completed share of the run. `moment` is named in the error if epoch, step or total is missing."""
        now = self.unit
        if now is None or not self.total:
            raise ValueError(f"{moment}: switch.step needs epoch= or step=, and total= in the same unit")
        return now / self.total

    def __str__(self) -> str:
        """
        >>> print(Position(epoch=3, step=120, total=90))
        epoch 3, step 120
        """
        counts = {"epoch": self.epoch, "step": self.step}
        return ", ".join(f"{unit} {count}" for unit, count in counts.items() if count is not None)


@dataclass(frozen=True)
class AtEpoch:
    """True from epoch `n` on, counted from 0.

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
    """True from step `n` on, counted from 0."""

    n: int

    def __call__(self, at: Position) -> bool:
        if at.step is None:
            raise ValueError(f"{self}: switch.step needs step=")
        return at.step >= self.n


@dataclass(frozen=True)
class AtFraction:
    """True from this share of the run on, a number between 0 and 1.

    >>> AtFraction(0.1)(Position(epoch=3, total=30))
    True
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"AtFraction: {self.share!r} is not a number between 0 and 1")

    def __call__(self, at: Position) -> bool:
        return at.fraction(self) >= self.share


@dataclass(frozen=True, kw_only=True)
class RanksSettle:
    """True once the smoothed stable ranks of the layers have stopped changing, as in Cuttlefish, or `latest` is reached.

    The defaults are the authors' settings for CIFAR; for ImageNet they use window 5, span 5, tolerance 0.33. Ranks of weights
    that Muon trains rarely settle, so with Muon `latest` decides.
    """

    #: Epochs, or steps if `epoch` is not given, between two observations. None: each epoch, or every sixtieth of the
    #: `total` steps (100 steps without it): from one step to the next ranks hardly change, and an observation is an SVD.
    every: int | None = None
    window: int = 15  # of the moving average, in observations; shorter → follows faster
    span: int = 11  # number of consecutive changes that must be small; shorter → switches earlier
    tolerance: float = 0.1  # largest mean size of these changes; larger → switches earlier
    latest: Callable[[Position], bool] | None = None  # None: at a third of the run, if `total` is given

    def due(self, at: Position) -> bool:
        """Whether the stable ranks are observed at this position.

        >>> [RanksSettle().due(Position(epoch=3)), RanksSettle().due(Position(step=3, total=600))]
        [True, False]
        """
        now = at.unit
        if now is None:
            raise ValueError("RanksSettle: switch.step needs epoch= or step=")
        steps = 100 if at.total is None else max(at.total // 60, 1)
        return now % (self.every or (steps if at.epoch is None else 1)) == 0

    def overdue(self, at: Position) -> bool:
        """Whether `latest` is reached. Its default never is without a total.

        >>> [RanksSettle().overdue(Position(epoch=5, total=total)) for total in (10, 20, None)]
        [True, False, False]
        """
        if self.latest is None:
            return at.total is not None and AtFraction(1 / 3)(at)
        return bool(self.latest(at))

    def settled(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Whether the stable ranks have stopped changing.

        Args:
            history: stable ranks by entry name, one mapping for each observation.

        >>> flat = [{"fc": 12.0}] * 12
        >>> RanksSettle().settled(flat), RanksSettle().settled(flat[:11])
        (True, False)
        """
        if len(history) <= self.span:
            return False
        weight = 2 / (self.window + 1)
        names = set.intersection(*map(set, history))  # a layer may have been frozen on the way
        average = {name: history[0][name] for name in names}
        changes = []
        for ranks in history[1:]:
            before = average
            average = {name: (1 - weight) * before[name] + weight * ranks[name] for name in before}
            changes.append(sum(abs(average[n] - before[n]) for n in before) / max(len(before), 1))
        return sum(changes[-self.span :]) / self.span <= self.tolerance


When = Callable[[Position], bool]


def known_in_advance(moment: object) -> bool:
    """Whether a moment depends only on the position, so that all workers know without communication that it is not due.

    >>> known_in_advance(AtEpoch(3)), known_in_advance(RanksSettle()), known_in_advance(lambda at: True)
    (True, True, False)
    """
    if isinstance(moment, RanksSettle):
        return moment.latest is None or known_in_advance(moment.latest)
    return type(moment) in (AtEpoch, AtStep, AtFraction)


def counts_steps(moment: object) -> bool:
    """Whether a moment may fall inside an epoch and is known from the step alone.

    >>> [counts_steps(moment) for moment in (AtFraction(0.5), RanksSettle(), RanksSettle(latest=AtEpoch(9)), AtEpoch(9))]
    [True, True, False, False]
    """
    if isinstance(moment, RanksSettle):  # `every` of the user may be in epochs
        return moment.every is None and (moment.latest is None or counts_steps(moment.latest))
    return isinstance(moment, AtStep | AtFraction)


def moment_text(when: object) -> str:
    """Text of a moment that is the same in every process. The `repr` of a function contains its address.

    >>> moment_text(AtEpoch(3)), moment_text(all), moment_text(RanksSettle(latest=any))
    ('AtEpoch(n=3)', 'all', 'RanksSettle(every=None, window=15, span=11, tolerance=0.1, latest=any)')
    """
    if isinstance(when, RanksSettle):
        values = {f.name: getattr(when, f.name) for f in fields(when)} | {"latest": moment_text(when.latest)}
        return f"RanksSettle({', '.join(f'{name}={value}' for name, value in values.items())})"
    if isinstance(when, functools.partial):
        return moment_text(when.func)
    if when is not None and type(when).__repr__ is object.__repr__:
        return type(when).__qualname__
    return str(getattr(when, "__qualname__", None) or repr(when))
