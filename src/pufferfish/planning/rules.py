"""Which ranks: the rules that choose the rank of a matrix; `select` gives them to entries, `apply_rules` applies them."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..layers import Matrix, low_rank_type, matches

if TYPE_CHECKING:
    from .entries import Entry, Plan


@dataclass(frozen=True)
class Rule:
    """Base class of rank rules. A subclass defines `rank`; plans save it by its class name and fields."""

    #: Whether the rule needs singular values, so that it chooses ranks when the plan is applied.
    needs_weights: ClassVar[bool] = False
    _known: ClassVar[dict[str, type[Rule]]] = {}
    #: Ranks are rounded up to a multiple of it, then down to the largest one that saves weights. 16 suits GPUs; 1
    #: reproduces the paper's counts.
    multiple: int = field(default=16, kw_only=True, repr=False)

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
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {"rule": type(self).__name__, **settings}

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
        if not 0 < self.ratio < 1:
            raise ValueError(f"Ratio: {self.ratio!r} is not between 0 and 1")

    def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
        return int(self.ratio * min(matrix.m, matrix.n))

    def __str__(self) -> str:
        return f"ratio {self.ratio:g}"


@dataclass(frozen=True)
class Fixed(Rule):
    """The same rank everywhere, never rounded to a multiple."""

    r: int
    multiple: int = field(default=1, init=False, repr=False)

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
        if not 0 < self.keep < 1:
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
        initial: Spectra at initialisation, `pf.planning.spectra(model)` computed before training, or the stable ranks
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
        if not 0 < self.at_most <= 1:
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
            hint = "compute it with pf.planning.spectra(model)"
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
        if len(amounts) != 1 or not 0 < amounts[0] < math.inf:
            raise ValueError("Budget: give exactly one of params=, macs= and bytes=, as a positive number")

    @property
    def unit(self) -> str:
        """Name of the field that is given: params, macs or bytes."""
        return next(name for name in ("params", "macs", "bytes") if getattr(self, name) is not None)

    @property
    def amount(self) -> float:
        """Value of that field."""
        return float(getattr(self, self.unit))

    def __str__(self) -> str:
        return f"budget {self.unit} {self.amount:,.0f}"


RankLike = int | float | Rule


def select(
    entries: list[Entry],
    layers: Mapping[str, nn.Module],
    rank: RankLike,
    *,
    embed: RankLike | None,
    keep: Iterable[str],
    only: Iterable[str],
    overrides: Mapping[str, RankLike],
) -> list[Entry]:
    """Give the entries that become low-rank their rule, and the others a reason. For the arguments see `plan`."""
    rule = as_rule(rank)
    embed_rule = None if embed is None else as_rule(embed, "embed")
    rules = {pattern: as_rule(value) for pattern, value in overrides.items()}
    for option, patterns in {"keep": keep, "only": only, "overrides": overrides}.items():
        for pattern in patterns:
            if not any(matches(e.name, pattern) for e in entries):
                names = ", ".join(e.name for e in entries[:6]) + ", …" * (len(entries) > 6)
                raise ValueError(
                    f"{option}: the pattern {pattern!r} matches no layer; the layers are {names}"
                )
    selected = []
    for e in entries:
        if not e.reason:
            assert e.matrix is not None
            named = [own for pattern, own in rules.items() if matches(e.name, pattern)]
            chosen = named[-1] if named else (embed_rule if e.matrix.lookup else None) or rule
            if why := _why_left_out(e, layers[e.layer], chosen, bool(named), keep, only):
                e = e.keep_dense(why)
            else:
                e = dataclasses.replace(e, rule=chosen, note=chosen.note(e.name))
        selected.append(e)
    return selected


def _why_left_out(
    e: Entry, layer: nn.Module, rule: Rule, named: bool, keep: Iterable[str], only: Iterable[str]
) -> str:
    """Reason why an entry stays dense by the arguments of `plan`; "" if it gets its rule. `named`: in `overrides`."""
    for pattern in keep:
        if matches(e.name, pattern):
            return f"kept by pattern {pattern!r}"
    if only and not any(matches(e.name, pattern) for pattern in only):
        return "not matched by `only`"
    if not (e.trainable or named):
        return "frozen: training could not reduce its error; naming it in overrides= factorizes it"
    if not (only or named) and _slower_on_its_device(layer):
        return (
            "low rank is slower on CUDA here; naming it in only= or overrides= factorizes it, for fewer bytes"
        )
    if isinstance(rule, Budget) and rule.unit == "macs" and e.matrix and e.matrix.lookup:
        return "a lookup has no MACs to save"
    return ""


def _slower_on_its_device(layer: nn.Module) -> bool:
    kind = low_rank_type(type(layer))
    return kind is not None and kind.slower_on_cuda and all(p.is_cuda for p in layer.parameters())


def as_rule(rank: RankLike, option: str = "rank") -> Rule:
    """Convert a float in (0, 1) to `Ratio` and an int ≥ 1 to `Fixed`; a rule is returned unchanged.

    `option` is the argument that errors name.
    """
    if isinstance(rank, Rule):
        if rank.multiple < 1:
            raise ValueError(f"{option}: multiple={rank.multiple} is not a whole number ≥ 1")
        return rank
    if isinstance(rank, bool) or not isinstance(rank, int | float):
        raise TypeError(
            f"{option}={rank!r}: give a float in (0, 1), an int ≥ 1 or a rule such as pf.Energy(0.9)"
        )
    try:
        return Ratio(rank) if isinstance(rank, float) else Fixed(rank)
    except ValueError:
        raise ValueError(
            f"{option}={rank}: a share of the full rank is a float in (0, 1), a fixed rank an int ≥ 1"
        ) from None


def stable_rank(spectrum: Tensor) -> float:
    """Compute ‖W‖_F² / σ_max² from singular values, largest first; 0 for a zero matrix."""
    squares = spectrum.double().square()
    return float(squares.sum() / squares[0]) if len(squares) and squares[0] > 0 else 0.0


def apply_rules(plan: Plan, spectra: Mapping[str, Tensor] | None) -> Plan:
    """Replace rules by ranks: all of them if `spectra` are given, else those that do not need the weights."""
    limits = {e.name: e.rule for e in plan.entries if isinstance(e.rule, StableRank)}
    entries = [_with_rank(e, spectra) for e in plan.entries]
    for share in dict.fromkeys(rule.at_most for rule in limits.values()):
        entries = _at_most(share, {k: rule for k, rule in limits.items() if rule.at_most == share}, entries)
    plan = plan.replace(entries)
    budgets = list(dict.fromkeys(e.rule for e in entries if isinstance(e.rule, Budget)))
    if len(budgets) > 1:
        raise ValueError("a plan can have only one Budget; use Ratio or Fixed in overrides")
    if budgets and budgets[0].unit == "macs" and plan.before.forward_macs is None:
        raise ValueError("Budget(macs=…) needs example=, a batch to count MACs on")
    return plan if spectra is None or not budgets else _within_budget(plan, budgets[0], spectra)


def _with_rank(e: Entry, spectra: Mapping[str, Tensor] | None) -> Entry:
    """The entry at the rank of its rule, or dense where no rank saves weights; as it is while the rule lacks the weights."""
    rule, x = e.rule, e.matrix
    if rule is None or x is None:
        return e
    if not rule.needs_weights:
        r = rule.rank(x, e.name, None)
    elif not align(x.full_rank, x, rule.multiple):
        r = 1  # stays dense whatever the spectrum is
    elif spectra is None or isinstance(rule, Budget):
        if isinstance(rule, StableRank):
            rule.at_start(e.name)  # raises for a missing initial spectrum now, not when the plan is applied
        return e
    else:
        r = rule.rank(x, e.name, spectra[e.name])
    rounded = align(r, x, rule.multiple)
    if rounded and not (isinstance(rule, Fixed) and rounded < r):  # a fixed rank is not lowered
        return e.with_rank(rounded)
    smallest = rule.multiple if rule.multiple > 1 else max(r, 1)
    return e.keep_dense(f"not smaller at rank {smallest}: the largest that saves is {largest_rank(x)}")


def align(r: int, matrix: Matrix, multiple: int) -> int:
    """Round `r` up to a multiple, then down to the largest one that saves weights; 0 if there is none."""
    return min(-(-max(r, 1) // multiple) * multiple, largest_rank(matrix) // multiple * multiple)


def largest_rank(matrix: Matrix) -> int:
    """Largest rank whose factors have fewer weights than the matrix; 0 if there is none."""
    return (matrix.m * matrix.n - 1) // (matrix.m + matrix.n)


def _at_most(share: float, rules: Mapping[str, Rule], entries: list[Entry]) -> list[Entry]:
    """Lower the ranks that these rules chose, where together they keep a larger share of their weights."""
    group = {e.name: e for e in entries if e.name in rules and e.rank}
    if sum(e.after for e in group.values()) <= share * sum(e.before for e in group.values()):
        return entries
    for e in group.values():
        assert e.matrix is not None
        assert e.rank is not None
        x = e.matrix
        most = align(int(share * x.m * x.n / (x.m + x.n)), x, rules[e.name].multiple)
        group[e.name] = dataclasses.replace(e.with_rank(min(e.rank, most)), asked=e.rank)
    return [group.get(e.name, e) for e in entries]


def _within_budget(plan: Plan, budget: Budget, spectra: Mapping[str, Tensor]) -> Plan:
    """Replace the budget rule by ranks, shared out among the entries that have it."""
    chosen = [e for e in plan.entries if e.rule == budget]
    after = plan.after
    amounts = {"params": after.parameters, "bytes": after.gradient_bytes, "macs": after.forward_macs}
    total = amounts[budget.unit]
    assert total is not None
    if budget.amount >= total:
        met = "the budget is met without it"
        return plan.replace(e.keep_dense(met) if e in chosen else e for e in plan.entries)
    candidates = []
    for e in chosen:
        assert e.matrix is not None
        macs = (e.positions or 0) * e.matrix.used_blocks / e.matrix.blocks
        costs = {"params": 1, "bytes": e.itemsize * e.trainable, "macs": macs}
        candidates.append(
            Candidate(matrix=e.matrix, spectrum=spectra[e.name], cost_per_weight=costs[budget.unit])
        )
    rest = total - sum(c.cost_per_weight * c.matrix.numel for c in candidates)
    spare = 0.01 * budget.amount
    ranks = allocate(candidates, budget.amount - rest, budget.multiple, spare)
    dense = "the budget is best spent on leaving it dense"
    shared = {
        e.name: e.with_rank(r) if r else e.keep_dense(dense) for e, r in zip(chosen, ranks, strict=True)
    }
    return plan.replace(shared.get(e.name, e) for e in plan.entries)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A matrix that takes part in sharing out a budget."""

    matrix: Matrix
    spectrum: Tensor  # singular values, largest first
    cost_per_weight: float  # 1 for parameters, positions for MACs, bytes per element for bytes


def allocate(
    candidates: Sequence[Candidate], budget: float, multiple: int, spare: float = 0.0
) -> list[int | None]:
    """Choose ranks whose total cost stays below a budget; None: the matrix stays dense.

    Greedy: the next step of `multiple` ranks goes to the matrix that gains most relative energy σ²/‖W‖² for
    its cost. Singular values are sorted, so the steps of one matrix come in the right order. If more than
    `spare` is left, one or two steps are exchanged for others that fill the budget better, if that costs
    little energy.

    Args:
        budget: Largest total cost, in units of `cost_per_weight`.
        spare: Part of the budget that may stay unused.
    """
    levels = [_levels(c, multiple) for c in candidates]
    left = budget - sum(x[0].cost for x in levels)
    if left < 0:
        raise ValueError(
            f"the budget is too small: at rank {multiple} everywhere the factorized layers exceed their share by "
            f"{-left:,.0f}; raise the budget, or lower `multiple`"
        )
    left, at = _spend(levels, [0] * len(levels), left)
    count = 1
    while left > spare and count <= (2 if len(levels) <= 40 else 1):  # many matrices need no pairs
        movable = [i for i, k in enumerate(at) if k]
        exchanges = (_exchange(levels, at, left, taken) for taken in combinations(movable, count))
        fuller = [(rest <= spare, _energy(levels, new), rest, new) for rest, new in exchanges if rest < left]
        best = max(fuller, key=lambda x: x[:2], default=None)
        if best is not None and best[1] > 0.95 * _energy(levels, at):
            *_, left, at = best
        else:
            count += 1
    return [x[k].rank for x, k in zip(levels, at, strict=True)]


class _Level(NamedTuple):
    """One of the ranks that a matrix can take, with its cost and the relative energy that it keeps."""

    rank: int | None
    cost: float
    energy: float


def _levels(c: Candidate, multiple: int) -> list[_Level]:
    """The ranks of a matrix from the smallest to dense."""
    squares = c.spectrum.double().square()
    sums = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
    kept = (sums / sums[-1].clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    ranks = range(multiple, largest_rank(c.matrix) + 1, multiple)
    levels = [_Level(r, c.cost_per_weight * c.matrix.factor_numel(r), kept[r]) for r in ranks]
    return [*levels, _Level(None, c.cost_per_weight * c.matrix.numel, 1.0)]


def _spend(
    levels: Sequence[Sequence[_Level]], at: Sequence[int], left: float, frozen: tuple[int, ...] = ()
) -> tuple[float, list[int]]:
    """Spend the remaining budget `left` in steps from the levels `at`; the `frozen` matrices stay where they are."""
    at = list(at)

    def step(i: int) -> tuple[float, int]:
        """Next step of a matrix: (−gain per cost, matrix)."""
        now, after = levels[i][at[i] : at[i] + 2]
        return -(after.energy - now.energy) / max(after.cost - now.cost, 1e-300), i

    steps = [step(i) for i, x in enumerate(levels) if at[i] + 1 < len(x) and i not in frozen]
    heapq.heapify(steps)
    while steps:
        _, i = heapq.heappop(steps)
        extra = levels[i][at[i] + 1].cost - levels[i][at[i]].cost
        if extra > left:
            continue  # a cheaper step of another matrix may still fit
        left -= extra
        at[i] += 1
        if at[i] + 1 < len(levels[i]):
            heapq.heappush(steps, step(i))
    return left, at


def _exchange(
    levels: Sequence[Sequence[_Level]], at: Sequence[int], left: float, taken: tuple[int, ...]
) -> tuple[float, list[int]]:
    """Take back the last step of the matrices `taken` and spend its cost on the others."""
    lowered = list(at)
    for i in taken:
        lowered[i] -= 1
        left += levels[i][at[i]].cost - levels[i][lowered[i]].cost
    return _spend(levels, lowered, left, frozen=taken)


def _energy(levels: Sequence[Sequence[_Level]], at: Sequence[int]) -> float:
    return sum(x[k].energy for x, k in zip(levels, at, strict=True))
