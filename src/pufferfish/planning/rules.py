"""Rules that choose the rank of a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..layers import Matrix


@dataclass(frozen=True)
class Rule:
    """A way to choose ranks. To add one: subclass, and define `rank`; plans save it by its class name."""

    #: Whether the rule looks at the weights, so that it decides at the switch and not before.
    needs_weights: ClassVar[bool] = False
    #: Whether its ranks are rounded to the plan's `multiple`.
    aligned: ClassVar[bool] = True
    _known: ClassVar[dict[str, type[Rule]]] = {}

    def __init_subclass__(cls) -> None:
        Rule._known[cls.__name__] = cls

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        """The rank for one matrix; `spectrum` (singular values) is there when `needs_weights`."""
        raise NotImplementedError

    def note(self, name: str) -> str:
        """What the reader of a plan should know about this rule's answer for one matrix."""
        return ""

    def as_json(self) -> dict[str, Any]:
        return {"rule": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rule:
        settings = dict(data)
        name = settings.pop("rule", None)
        if name not in Rule._known:
            raise ValueError(f"unknown rank rule {name!r}; known are {', '.join(sorted(Rule._known))}")
        return Rule._known[name](**settings)


@dataclass(frozen=True)
class Ratio(Rule):
    """A share of the full rank: r = int(ratio × min(m, n)). The paper's rule, at 0.25.

    >>> Ratio(0.25).rank(Matrix(name="", weight="weight", shape=(64, 100), m=64, n=100), "fc", None)
    16
    """

    ratio: float = 0.25  # lower → smaller model

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise ValueError(f"Ratio: {self.ratio} is not between 0 and 1")

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        return int(self.ratio * matrix.full_rank)

    def __str__(self) -> str:
        return f"ratio {self.ratio:g}"


@dataclass(frozen=True)
class Fixed(Rule):
    """The same rank everywhere, taken as it is: never rounded to a multiple."""

    r: int
    aligned = False

    def __post_init__(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"Fixed: {self.r!r} is not a whole number ≥ 1")

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        return self.r

    def __str__(self) -> str:
        return f"rank {self.r}"


@dataclass(frozen=True)
class Energy(Rule):
    """The smallest rank that keeps this share of ‖W‖_F² = Σσ²."""

    keep: float = 0.9  # lower → smaller model
    needs_weights = True

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise ValueError(f"Energy: {self.keep} is not between 0 and 1")

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        assert spectrum is not None
        kept = spectrum.double().square().cumsum(0)
        return int(torch.searchsorted(kept, self.keep * kept[-1])) + 1

    def __str__(self) -> str:
        return f"energy {self.keep:g}"


@dataclass(frozen=True)
class StableRank(Rule):
    """Cuttlefish's scaled stable rank: r = ⌈ξ·s⌉ with s = ‖W‖_F² / σ_max² and ξ = full rank / s at the start.

    `initial` are the spectra at initialisation, `pf.spectra(model)` taken before training, or the stable
    ranks themselves by name. Without it ξ comes from the closed form for random matrices,
    s = mn / (√m + √n)², and the plan says "assumed".
    """

    initial: Mapping[str, Any] | None = None
    needs_weights = True

    def __post_init__(self) -> None:
        if self.initial is not None:
            # Stable ranks are all that is needed, and numbers can be saved.
            ranks = {
                k: float(stable_rank(v) if isinstance(v, Tensor) else v) for k, v in self.initial.items()
            }
            object.__setattr__(self, "initial", ranks)

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        assert spectrum is not None
        start = self.at_start(name)
        if not start:  # not given, or a layer that started at zero
            start = matrix.m * matrix.n / (math.sqrt(matrix.m) + math.sqrt(matrix.n)) ** 2
        scale = matrix.full_rank / start
        return max(1, math.ceil(scale * stable_rank(spectrum)))

    def at_start(self, name: str) -> float:
        """The matrix' stable rank at initialisation, 0 where none was given."""
        if self.initial is None:
            return 0.0
        if name not in self.initial:
            raise ValueError(
                f"StableRank: `initial` has no spectrum of {name!r}; take pf.spectra of this model"
            )
        return float(self.initial[name])

    def note(self, name: str) -> str:
        return "" if self.initial and self.initial.get(name) else "ξ assumed"

    def __str__(self) -> str:
        return "stable rank"


@dataclass(frozen=True)
class Budget(Rule):
    """What the whole model may cost afterwards; rank goes where the singular values say it helps most.

    One of: parameters, forward MACs of the plan's example, or gradient bytes a step.
    """

    params: float | None = None
    macs: float | None = None
    bytes: float | None = None
    needs_weights = True

    def __post_init__(self) -> None:
        given = [x for x in (self.params, self.macs, self.bytes) if x is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ValueError("Budget: give one of params=, macs=, bytes=, a positive number")

    @property
    def unit(self) -> str:
        return next(name for name, value in asdict(self).items() if value is not None)

    @property
    def amount(self) -> float:
        return float(next(value for value in asdict(self).values() if value is not None))

    def __str__(self) -> str:
        return f"budget {self.unit} {self.amount:,.0f}"


RankLike = int | float | Rule


def as_rule(rank: RankLike) -> Rule:
    """A float in (0, 1) is a `Ratio`, an int ≥ 1 is `Fixed`, a rule is itself.

    >>> as_rule(0.25), as_rule(8)
    (Ratio(ratio=0.25), Fixed(r=8))
    """
    if isinstance(rank, Rule):
        return rank
    if isinstance(rank, bool) or not isinstance(rank, int | float):
        raise TypeError(f"rank={rank!r}: give a float in (0, 1), an int ≥ 1 or a rule such as pf.Energy(0.9)")
    if isinstance(rank, float):
        if not 0 < rank < 1:
            hint = f"; for the fixed rank {int(rank)} write rank={int(rank)}" if rank >= 1 else ""
            raise ValueError(f"rank={rank}: a float is a share of the full rank, in (0, 1){hint}")
        return Ratio(rank)
    return Fixed(rank)


def stable_rank(spectrum: Tensor) -> float:
    """‖W‖_F² / σ_max² from singular values, largest first; 0 for a zero matrix.

    >>> stable_rank(torch.ones(5))
    5.0
    """
    squares = spectrum.double().square()
    return float(squares.sum() / squares[0]) if squares[0] > 0 else 0.0


def largest_rank(matrix: Matrix, min_saving: float) -> int:
    """The largest rank whose factors save at least `min_saving` of the matrix (and something at all)."""
    if min_saving < 0:  # forced: saving does not matter
        return matrix.full_rank
    allowed = (1 - min_saving) * matrix.m * matrix.n
    r = min(int(allowed // (matrix.m + matrix.n)) + 1, matrix.full_rank)
    while r and (r * (matrix.m + matrix.n) > allowed or r * (matrix.m + matrix.n) >= matrix.m * matrix.n):
        r -= 1
    return r


def align(r: int, matrix: Matrix, multiple: int, min_saving: float) -> int:
    """`r` rounded up to a multiple, then down to the largest one that still saves; 0 where there is none.

    >>> square = Matrix(name="", weight="weight", shape=(64, 64), m=64, n=64)
    >>> [align(r, square, 16, 0.0) for r in (1, 16, 17, 40)]
    [16, 16, 16, 16]
    """
    most = largest_rank(matrix, min_saving)
    if min_saving < 0 and most < multiple:
        return min(max(r, 1), most)
    return min(-(-max(r, 1) // multiple) * multiple, most // multiple * multiple)
