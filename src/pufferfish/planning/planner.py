"""Making a plan: for every layer its rank, the rule that will decide it, or why it stays."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layers import low_rank_type
from ..layers.names import own_name, unwrap
from . import svd
from .budget import Candidate, allocate
from .candidates import candidates
from .cost import totals
from .plan import Entry, Plan
from .profile import Call, Example, Profile, profile
from .rules import Budget, RankLike, Rule, StableRank, align, as_rule, largest_rank
from .timing import measure


def plan(
    model: nn.Module,
    rank: RankLike = 0.25,
    *,
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    overrides: Mapping[str, RankLike] | None = None,
    multiple: int = 16,
    min_saving: float = 0.0,
    example: Example | None = None,
    measure: bool | Literal["graph"] = False,
) -> Plan:
    """Look at a model and say what would be made low-rank. Touches nothing.

    Args:
        rank: a float in (0, 1) is a share of each layer's full rank, an int a fixed rank, or a rule:
            `Ratio`, `Fixed`, `Energy`, `StableRank`, `Budget`. Rules that look at the weights decide when
            the plan is applied; `resolve(plan, model)` shows what they say today.
        keep: name patterns (`fnmatch`, over layer names) of layers that stay as they are.
        only: where given, all other layers stay.
        overrides: name pattern → rank for some layers; the last match wins.
        multiple: computed ranks are rounded up to it, then down to the largest one that still saves.
            GPUs want 16; the paper's own counts need 1. `Fixed` ranks are taken as they are.
        min_saving: share of a layer's weights that must be saved; a negative one forces factorizing.
        example: a batch (tensor, tuple of arguments, dict of keyword arguments) or a function of the
            model that runs it: gives MACs, and what `measure` needs.
        measure: time every layer dense and low-rank on the model's device, and leave those dense that
            would be slower. True times them as eager PyTorch runs them; "graph" as a captured CUDA graph
            does, without launch overhead, which eats the gain of small layers on a fast GPU.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> print(pf.plan(model, rank=0.25, keep=["2"]))
    layer  type    shape    rank        weights  of bytes left  why it stays
    0      Linear  256×256    64  65,536→32,768          92.1%
    2      Linear  10×256      –          2,560           7.2%  kept by pattern '2'
    <BLANKLINE>
                             before    after
    parameters               68,362   35,594  1.92× smaller
    gradient bytes (DDP)    273,448  142,376  1.92× smaller
    FSDP2 bytes             820,344  427,128  1.92× smaller
    memory, SGD momentum    820,344  427,128  1.92× smaller
    memory, Adam          1,093,792  569,504  1.92× smaller
    """
    rule = as_rule(rank)
    rules = {pattern: as_rule(value) for pattern, value in (overrides or {}).items()}
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ValueError(f"multiple={multiple!r} is not a whole number ≥ 1")
    if not min_saving < 1:
        raise ValueError(f"min_saving={min_saving}: it is a share of a layer's weights, below 1")
    if measure and example is None:
        raise ValueError("measure=True needs example=, a batch that says which shapes the layers see")
    if measure == "graph" and not all(p.is_cuda for p in model.parameters()):
        raise ValueError('measure="graph" times CUDA graphs: move the model to a CUDA device')
    keep, only = as_patterns("keep", keep), as_patterns("only", only)

    seen = None if example is None else profile(model, example)
    entries, live = candidates(model, seen)
    _match_patterns(entries, keep, only, rules)
    entries = [_apply(e, rule, keep, only, rules) for e in entries]
    if seen is None and any(isinstance(e.rule, Budget) and e.rule.unit == "macs" for e in entries):
        raise ValueError("Budget(macs=…) needs example=, a batch to count them on")
    made = Plan(
        entries=tuple(entries),
        multiple=multiple,
        min_saving=min_saving,
        before=totals(model, seen),
        parameters=tuple(own_name(name) for name, _ in unwrap(model).named_parameters()),
        functional=dict(seen.functional) if seen else {},
    )
    made = settle(made, None)
    for e in made.entries:
        if isinstance(e.rule, StableRank):
            e.rule.at_start(e.name)  # refuses a missing one now, not when the rule is answered
    if measure:
        assert seen is not None
        made = _measured(made, live, seen, graph=measure == "graph")
    return made


def resolve(made: Plan, model: nn.Module) -> Plan:
    """The plan with every rule answered from the model's weights as they are now.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> made = pf.plan(model, rank=pf.Energy(0.5))
    >>> made["0"].rank, pf.resolve(made, model)["0"].rank
    (None, 16)
    """
    waiting = [e.name for e in made.entries if e.rule is not None]
    if not waiting:
        return made
    found = spectra(model, waiting)
    for name in waiting:
        if name not in found:
            raise ValueError(f"{name}: the plan has a rule for it, the model no layer that it could be for")
    return settle(made, found)


def spectra(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Singular values of every matrix that could be factorized, by entry name (or of `names` alone).

    >>> import pufferfish as pf
    >>> {name: len(s) for name, s in pf.spectra(nn.Sequential(nn.Linear(64, 32))).items()}
    {'0': 32}
    """
    entries, live = candidates(model, None)
    wanted = None if names is None else set(names)
    found = {}
    for e in entries:
        if e.matrix is not None and not e.reason and (wanted is None or e.name in wanted):
            weight = live[e.layer].get_parameter(e.matrix.weight)
            check_values(e.name, weight)
            found[e.name] = svd.spectrum(e.matrix.unroll(weight.detach()))
    return found


def check_values(name: str, weight: Tensor) -> None:
    """Singular values need real, finite weights."""
    if weight.is_meta:
        raise ValueError(f"{name}: the weight is on the meta device and has no values")
    if not torch.isfinite(weight.detach()).all():
        raise ValueError(f"{name}: the weight contains inf or NaN; nothing was changed")


def as_patterns(option: str, given: Iterable[str]) -> tuple[str, ...]:
    """The name patterns; a lone string would be taken letter by letter."""
    if isinstance(given, str):
        raise TypeError(f"{option}={given!r}: give a list of patterns, {option}=[{given!r}]")
    return tuple(given)


def _matches(e: Entry, pattern: str) -> bool:
    return fnmatch.fnmatchcase(e.name, pattern) or fnmatch.fnmatchcase(e.layer, pattern)


def _match_patterns(
    entries: list[Entry], keep: tuple[str, ...], only: tuple[str, ...], rules: Mapping[str, Rule]
) -> None:
    for option, patterns in (("keep", keep), ("only", only), ("overrides", tuple(rules))):
        for pattern in patterns:
            if not any(_matches(e, pattern) for e in entries):
                names = ", ".join(e.name for e in entries[:6])
                raise ValueError(
                    f"{option}: the pattern {pattern!r} matches no layer; the layers are {names}"
                    f"{', …' if len(entries) > 6 else ''}"
                )


def _apply(
    e: Entry, rule: Rule, keep: tuple[str, ...], only: tuple[str, ...], rules: Mapping[str, Rule]
) -> Entry:
    """The entry with its rule, or with the reason it stays."""
    if e.reason:
        return e
    for pattern in keep:
        if _matches(e, pattern):
            return e.stays(f"kept by pattern {pattern!r}")
    if only and not any(_matches(e, pattern) for pattern in only):
        return e.stays("not matched by `only`")
    for pattern, special in rules.items():
        rule = special if _matches(e, pattern) else rule
    return e.ruled(rule)


def settle(made: Plan, spectra: Mapping[str, Tensor] | None) -> Plan:
    """Answer the rules that can be answered: all of them when there are spectra."""
    entries = []
    for e in made.entries:
        if e.rule is None or e.matrix is None:
            entries.append(e)
        elif not e.rule.needs_weights:
            entries.append(_ranked(e, e.rule.rank(e.matrix, e.name, None), made))
        elif not align(e.matrix.full_rank, e.matrix, made.multiple if e.rule.aligned else 1, made.min_saving):
            entries.append(_ranked(e, 1, made))  # stays whatever the spectrum says
        elif spectra is None or isinstance(e.rule, Budget):
            entries.append(e)
        else:
            entries.append(_ranked(e, e.rule.rank(e.matrix, e.name, spectra[e.name]), made))
    made = made.replace(entries)
    budgets = list(dict.fromkeys(e.rule for e in made.entries if isinstance(e.rule, Budget)))
    if len(budgets) > 1:
        raise ValueError("only one Budget can hold for a model; use Ratio or Fixed in overrides")
    if budgets and spectra is not None:
        made = _spend(made, budgets[0], spectra)
    return made


def _ranked(e: Entry, r: int, made: Plan) -> Entry:
    """The entry at (about) rank `r`, or the reason why no rank serves."""
    assert e.matrix is not None
    assert e.rule is not None
    aligned = align(r, e.matrix, made.multiple if e.rule.aligned else 1, made.min_saving)
    if not e.rule.aligned and aligned < r and made.min_saving >= 0:
        aligned = 0  # a rank that was asked for is not bent
    if aligned:
        return e.ranked(aligned)
    most = largest_rank(e.matrix, made.min_saving)
    least = made.multiple if e.rule.aligned and made.multiple > 1 else max(r, 1)
    return e.stays(f"not smaller at rank {least}: the largest that saves is {most}")


def _spend(made: Plan, budget: Budget, spectra: Mapping[str, Tensor]) -> Plan:
    """Share a budget among the entries that have it."""
    chosen = [e for e in made.entries if e.rule is budget or e.rule == budget]
    per_weight = [
        {"params": 1, "bytes": e.itemsize * e.trainable, "macs": e.positions or 0}[budget.unit]
        for e in chosen
    ]
    total = {
        "params": made.after.parameters,
        "bytes": made.after.gradient_bytes,
        "macs": made.after.forward_macs,
    }[budget.unit]
    assert total is not None
    if budget.amount >= total:
        return made.replace(
            e.stays("the budget is met without it") if e in chosen else e for e in made.entries
        )
    candidates = [
        Candidate(matrix=e.matrix, spectrum=spectra[e.name], cost_per_weight=w)
        for e, w in zip(chosen, per_weight, strict=True)
        if e.matrix is not None
    ]
    rest = total - sum(c.cost_per_weight * c.matrix.numel for c in candidates)
    spare = 0.01 * budget.amount
    ranks = allocate(candidates, budget.amount - rest, made.multiple, made.min_saving, spare)
    by_name = dict(zip((e.name for e in chosen), ranks, strict=True))
    entries = []
    for e in made.entries:
        if e.name not in by_name:
            entries.append(e)
        elif (r := by_name[e.name]) is not None:
            entries.append(e.ranked(r))
        else:
            entries.append(e.stays("the budget is best spent on leaving it dense"))
    return made.replace(entries)


def _measured(made: Plan, live: Mapping[str, nn.Module], seen: Profile, graph: bool) -> Plan:
    """Time each layer that would change and leave the slower ones dense."""
    ranks: dict[str, dict[str, int]] = {}
    for e in made.entries:
        if e.matrix is not None and (e.rank or e.rule):
            # Before the spectrum is known a quarter of the full rank stands for what the rule will say.
            r = e.rank or align(e.matrix.full_rank // 4, e.matrix, made.multiple, made.min_saving)
            ranks.setdefault(e.layer, {})[e.matrix.name] = r
    cache: dict[Any, tuple[float, float]] = {}
    times = {}
    for layer, chosen in ranks.items():
        call = seen.calls.get(layer)
        if call is None:
            continue
        module = live[layer]
        kind = low_rank_type(type(module))
        assert kind is not None
        weights = [(p.dtype, p.requires_grad) for p in module.parameters()]
        key = (repr(module), repr(weights), tuple(chosen.items()), _shapes(call), call.autocast)
        if key not in cache:
            cache[key] = measure(module, kind(module, chosen), call, graph)
        times[layer] = cache[key]
    return made.replace(e.timed(times[e.layer]) if e.layer in times else e for e in made.entries)


def _shapes(call: Call) -> str:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return repr([(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in leaves])
