"""Rules that choose the rank of a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..layers import Matrix


@dataclass(frozen=True)
class Rule:
    """Base class of rank rules. A subclass defines `rank`; plans save it by its class name and fields."""

    #: Whether the rule needs singular values, so that it chooses ranks when the plan is applied.
    needs_weights: ClassVar[bool] = False
    #: Whether ranks are rounded to the plan's `multiple`.
    aligned: ClassVar[bool] = True
    _known: ClassVar[dict[str, type[Rule]]] = {}

    def __init_subclass__(cls) -> None:
        Rule._known[cls.__name__] = cls

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        """Choose the rank of one matrix. `spectrum` holds its singular values if `needs_weights`, else None."""
        raise NotImplementedError

    def note(self, name: str) -> str:
        """Remark about the rank of one matrix, shown in the printed plan."""
        return ""

    def as_json(self) -> dict[str, Any]:
        """Class name and fields, for plans."""
        return {"rule": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rule:
        """Create the rule that `as_json` described."""
        settings = dict(data)
        name = settings.pop("rule", None)
        if name not in Rule._known:
            raise ValueError(f"unknown rank rule {name!r}; known rules: {', '.join(sorted(Rule._known))}")
        return Rule._known[name](**settings)


@dataclass(frozen=True)
class Ratio(Rule):
    """A share of the full rank: r = int(ratio × min(m, n)). The paper uses 0.25.

    >>> Ratio(0.25).rank(Matrix(name="", weight="weight", shape=(64, 100), m=64, n=100), "fc", None)
    16
    """

    ratio: float = 0.25  # lower → smaller model

    def __post_init__(self) -> None:
        if not _is_number(self.ratio) or not 0 < self.ratio < 1:
            raise ValueError(f"Ratio: {self.ratio!r} is not between 0 and 1")

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        return int(self.ratio * matrix.full_rank)

    def __str__(self) -> str:
        return f"ratio {self.ratio:g}"


@dataclass(frozen=True)
class Fixed(Rule):
    """The same rank everywhere, never rounded to a multiple."""

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
    """The smallest rank that keeps this share of the energy ‖W‖_F² = Σσ²."""

    keep: float = 0.9  # lower → smaller model
    needs_weights = True

    def __post_init__(self) -> None:
        if not _is_number(self.keep) or not 0 < self.keep < 1:
            raise ValueError(f"Energy: {self.keep!r} is not between 0 and 1")

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        assert spectrum is not None
        energy = spectrum.double().square().cumsum(0)
        return int(torch.searchsorted(energy, self.keep * energy[-1])) + 1

    def __str__(self) -> str:
        return f"energy {self.keep:g}"


@dataclass(frozen=True)
class StableRank(Rule):
    """Cuttlefish's scaled stable rank: r = ⌈ξ·s⌉ with s = ‖W‖_F² / σ_max² and ξ = full rank / s at the start.

    Args:
        initial: Spectra at initialisation, `pf.spectra(model)` computed before training, or the stable ranks
            themselves, by name. Without it ξ is computed from the closed form for random matrices,
            s = mn / (√m + √n)², and the plan notes "ξ assumed".
        at_most: Share of their weights that all matrices with this rule may keep together. If stable ranks would keep
            more, no matrix keeps more than this share of its own weights, up to rounding. Muon keeps all singular values
            nearly equal, so with it stable ranks alone save nothing.

    >>> import pufferfish as pf
    >>> from torch import nn
    >>> flat = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    >>> _ = [nn.init.orthogonal_(layer.weight) for layer in flat]
    >>> [pf.resolve(pf.plan(flat, StableRank(at_most=share)), flat).after.parameters for share in (1.0, 0.5)]
    [114688, 65536]
    """

    initial: Mapping[str, Any] | None = None
    at_most: float = 1.0  # lower → smaller model where spectra are flat
    needs_weights = True

    def __post_init__(self) -> None:
        if not _is_number(self.at_most) or not 0 < self.at_most <= 1:
            raise ValueError(f"StableRank: at_most={self.at_most!r} is not a share in (0, 1]")
        if self.initial is not None:
            # Only the stable ranks are needed, and numbers can be saved in JSON.
            ranks = {
                k: float(stable_rank(v) if isinstance(v, Tensor) else v) for k, v in self.initial.items()
            }
            for name, rank in ranks.items():
                if not 0 <= rank < math.inf:
                    raise ValueError(f"StableRank: `initial` of {name!r} is {rank}; pass finite spectra")
            object.__setattr__(self, "initial", ranks)

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        assert spectrum is not None
        random = matrix.m * matrix.n / (math.sqrt(matrix.m) + math.sqrt(matrix.n)) ** 2
        start = self.at_start(name) or random  # 0: not given, or the layer was initialised to zero
        return max(1, math.ceil(matrix.full_rank / start * stable_rank(spectrum)))

    def at_start(self, name: str) -> float:
        """Stable rank of a matrix at initialisation, 0 without `initial`."""
        if self.initial is None:
            return 0.0
        if name not in self.initial:
            hint = "compute it with pf.spectra(model)"
            raise ValueError(f"StableRank: `initial` has no spectrum of {name!r}; {hint}")
        return float(self.initial[name])

    def note(self, name: str) -> str:
        return "" if self.initial and self.initial.get(name) else "ξ assumed"

    def __str__(self) -> str:
        return "stable rank" + (f", at most {self.at_most:g}" if self.at_most < 1 else "")


@dataclass(frozen=True)
class Budget(Rule):
    """Largest cost of the whole low-rank model. Ranks are chosen to keep the most energy for their cost.

    Give exactly one of the arguments.
    """

    params: float | None = None  # parameters
    macs: float | None = None  # forward MACs on the plan's example
    bytes: float | None = None  # gradient bytes per step
    needs_weights = True

    def __post_init__(self) -> None:
        amounts = [x for x in (self.params, self.macs, self.bytes) if x is not None]
        if len(amounts) != 1 or not _is_number(amounts[0]) or not 0 < amounts[0] < math.inf:
            raise ValueError("Budget: give exactly one of params=, macs= and bytes=, as a positive number")

    @property
    def unit(self) -> str:
        """Name of the field that is given: params, macs or bytes."""
        return next(name for name, value in asdict(self).items() if value is not None)

    @property
    def amount(self) -> float:
        """Value of that field."""
        return float(getattr(self, self.unit))

    def __str__(self) -> str:
        return f"budget {self.unit} {self.amount:,.0f}"


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


RankLike = int | float | Rule


def as_rule(rank: RankLike, option: str = "rank") -> Rule:
    """Convert a float in (0, 1) to `Ratio` and an int ≥ 1 to `Fixed`; a rule is returned unchanged.

    `option` is the argument that errors name.
    """
    if isinstance(rank, Rule):
        return rank
    if isinstance(rank, bool) or not isinstance(rank, int | float):
        raise TypeError(
            f"{option}={rank!r}: give a float in (0, 1), an int ≥ 1 or a rule such as pf.Energy(0.9)"
        )
    if isinstance(rank, float):
        if not 0 < rank < 1:
            whole = 1 <= rank < 1e9 and rank.is_integer()
            hint = f"; for the fixed rank {int(rank)} write {option}={int(rank)}" if whole else ""
            raise ValueError(f"{option}={rank}: a float is a share of the full rank, in (0, 1){hint}")
        return Ratio(rank)
    if rank < 1:
        raise ValueError(
            f"{option}={rank}: a fixed rank is a whole number ≥ 1, a share of the full rank a float such as 0.25"
        )
    return Fixed(rank)


def stable_rank(spectrum: Tensor) -> float:
    """Compute ‖W‖_F² / σ_max² from singular values, largest first; 0 for a zero matrix."""
    squares = spectrum.double().square()
    return float(squares.sum() / squares[0]) if len(squares) and squares[0] > 0 else 0.0


def largest_rank(matrix: Matrix, min_saving: float) -> int:
    """Largest rank whose factors save at least the share `min_saving` of the weights, and at least one weight."""
    if min_saving < 0:  # factorizing is forced
        return matrix.full_rank
    allowed = (1 - min_saving) * matrix.m * matrix.n
    r = min(int(allowed // (matrix.m + matrix.n)) + 1, matrix.full_rank)
    while r and (r * (matrix.m + matrix.n) > allowed or r * (matrix.m + matrix.n) >= matrix.m * matrix.n):
        r -= 1
    return r


def align(r: int, matrix: Matrix, multiple: int, min_saving: float) -> int:
    """Round `r` up to a multiple, then down to the largest one that saves weights; 0 if there is none."""
    largest = largest_rank(matrix, min_saving)
    if min_saving < 0 and largest < multiple:
        return min(max(r, 1), largest)
    return min(-(-max(r, 1) // multiple) * multiple, largest // multiple * multiple)
