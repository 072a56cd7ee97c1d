"""`plan`: choose for every layer its rank, the rule that will choose its rank, or the reason it stays dense."""

import dataclasses
import fnmatch
import os
from collections.abc import Iterable, Mapping
from typing import get_args

import torch.distributed as dist
from torch import Tensor, nn

from ..layers import LowRankLinear, low_rank_type
from ..layers.names import own_name, unwrap
from . import svd
from .budget import apply_budget
from .candidates import candidates
from .measured_times import with_measured_times
from .plan import Entry, Plan, check_is_plan, totals
from .profile import Call, Example, profile
from .progress import track
from .rules import Budget, RankLike, Rule, StableRank, align, as_rule, largest_rank
from .timing import Mode


def plan(
    model: nn.Module,
    rank: RankLike = 0.25,
    *,
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    overrides: Mapping[str, RankLike] | None = None,
    multiple: int = 16,
    min_saving: float = 0.0,
    embed: RankLike | None = None,
    frozen: bool = False,
    example: Example | None = None,
    measure: Mode | bool | None = None,
    link: float | None = None,
) -> Plan:
    """Plan which layers of a model become low-rank. Changes nothing.

    Args:
        rank: A float in (0, 1) is a share of each layer's full rank, an int a fixed rank, or a rule:
            `Ratio`, `Fixed`, `Energy`, `StableRank`, `Budget`. Rules that need the weights choose ranks
            when the plan is applied; `resolve(plan, model)` shows what they choose for the current weights.
        keep: Name patterns (`fnmatch`, over layer names) of layers that stay dense.
        only: Name patterns; if given, all other layers stay dense.
        overrides: Name pattern → rank for some layers; the last match applies.
        multiple: Computed ranks are rounded up to a multiple of it, then down to the largest one that saves
            weights. 16 suits GPUs; 1 reproduces the paper's counts. `Fixed` ranks are not rounded.
        min_saving: Share of a layer's weights that must be saved; a negative value forces factorizing.
        embed: Rank or rule for `nn.Embedding` layers, which stay dense without it. It pays for large vocabularies.
        frozen: Factorize weights that do not require a gradient too. They save no gradient bytes, and training
            cannot reduce the error of the factorization.
        example: A batch (tensor, tuple of arguments, dict of keyword arguments) or a function that runs the
            model. Needed for MACs and for `measure`.
        measure: Time the layers dense and low-rank on the model's device, in the mode that the job runs in, and keep
            those dense that would be slower: "eager" (or True), "compile" or "graph". Graphs and compiled graphs
            have no launch overhead, which outweighs the gain of small layers on a fast GPU. None is "eager" for a
            model on CUDA with an example, and False otherwise. It is also False in a job with several workers, which
            could decide differently: there, set it for the plan of a `Switch`, which makes them agree, or load one
            plan on all.
        link: Bytes of gradients per second that the workers average, such as `Link.all_reduce_rate`. A layer then
            becomes low-rank if that shortens its measured time plus the time to send its gradients.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> print(pf.plan(model, rank=0.25, keep=["2"]))
    layer  shape    rank        weights  bytes  note
    0      256×256    64  65.5 k→32.8 k  92.1%
    2      10×256      –         2.56 k   7.2%     1
    <BLANKLINE>
    1: kept by pattern '2'
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
    if multiple < 1:
        raise ValueError(f"multiple={multiple} is not a whole number ≥ 1")
    mode = _mode(measure, model, example)
    if link is not None and not (mode and 0 < link < float("inf")):
        raise ValueError(
            f"link={link!r}: pass the bytes per second that the workers average, above 0, together with example= and measure="
        )
    keep, only = as_patterns("keep", keep), as_patterns("only", only)
    embed_rule = None if embed is None else as_rule(embed, "embed")
    if embed_rule and not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise ValueError("embed: the model has no nn.Embedding; remove embed=")

    profiled = None if example is None else profile(model, example)
    entries, modules = candidates(model, profiled, embed=embed_rule is not None, frozen=frozen)
    _check_patterns(entries, keep=keep, only=only, overrides=rules)
    slow = {name for name, module in modules.items() if _slower_on_its_device(module)}
    entries = [_select(e, rule, embed_rule, keep, only, rules, e.layer in slow) for e in entries]
    if profiled is None and any(isinstance(e.rule, Budget) and e.rule.unit == "macs" for e in entries):
        raise ValueError("Budget(macs=…) needs example=, a batch to count MACs on")
    plan = Plan(
        entries=tuple(entries),
        multiple=multiple,
        min_saving=min_saving,
        before=totals(model, profiled),
        parameters=tuple(own_name(name) for name, _ in unwrap(model).named_parameters()),
        functional=dict(profiled.functional) if profiled else {},
        shared_inputs=_shared_inputs(profiled.calls, modules) if profiled else (),
    )
    plan = apply_rules(plan, None)
    for e in plan.entries:
        if isinstance(e.rule, StableRank):
            e.rule.at_start(e.name)  # raises for a missing initial spectrum now, not when the plan is applied
    if mode is None or profiled is None or example is None:
        return plan
    return with_measured_times(plan, model, modules, profiled, example, mode, link)


def _mode(measure: Mode | bool | None, model: nn.Module, example: Example | None) -> Mode | None:
    """The mode to measure layers in; None: they are not measured."""
    if not measure:
        by_default = measure is None and example is not None and _on_cuda(model) and not _several_workers()
        return "eager" if by_default else None
    if measure not in (True, *get_args(Mode)):
        raise ValueError(f'measure={measure!r} is not "eager", "compile", "graph", True, False or None')
    if example is None:
        raise ValueError(f"measure={measure!r} needs example=, a batch with the shapes that the layers see")
    if measure == "graph" and not _on_cuda(model):
        raise ValueError('measure="graph" times CUDA graphs: move the model to a CUDA device')
    return "eager" if measure is True else measure


def _on_cuda(model: nn.Module) -> bool:
    devices = {p.device.type for p in model.parameters()}
    return devices == {"cuda"}


def _several_workers() -> bool:
    """Whether this is a worker of several, in a process group or before it is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return os.environ.get("WORLD_SIZE", "1") != "1"


def resolve(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with the ranks that its rules choose for the model's current weights.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> plan = pf.plan(model, rank=pf.Energy(0.5))
    >>> plan["0"].rank, pf.resolve(plan, model)["0"].rank
    (None, 16)
    """
    check_is_plan(plan, "resolve")
    unresolved = [e.name for e in plan.entries if e.rule is not None]
    if not unresolved:
        return plan
    computed = spectra(model, unresolved)
    for name in unresolved:
        if name not in computed:
            raise ValueError(
                f"{name}: the plan has a rule for this layer, "
                "but no layer of the model with this name can be factorized"
            )
    return apply_rules(plan, computed)


def spectra(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Compute the singular values, largest first, of the matrices that can be factorized, by entry name.

    If `names` are given, only these entries are computed. Embeddings are computed only if they are named.

    >>> import pufferfish as pf
    >>> {name: len(s) for name, s in pf.spectra(nn.Sequential(nn.Linear(64, 32))).items()}
    {'0': 32}
    """
    found = track(factorizable(model, names), "computing singular values")
    return {e.name: matrix_spectrum(e, weight) for e, weight in found}


def factorizable(model: nn.Module, names: Iterable[str] | None = None) -> list[tuple[Entry, nn.Parameter]]:
    """Entries that can be factorized, with the parameter that holds each matrix; optionally only `names`."""
    entries, modules = candidates(model, None, embed=names is not None, frozen=True)
    chosen = None if names is None else set(names)
    return [
        (e, modules[e.layer].get_parameter(e.matrix.weight))
        for e in entries
        if e.matrix is not None and not e.reason and (chosen is None or e.name in chosen)
    ]


def matrix_spectrum(entry: Entry, weight: Tensor) -> Tensor:
    """Compute the singular values of one matrix from the dense parameter that holds it."""
    assert entry.matrix is not None
    svd.check_values(entry.name, weight)
    return svd.spectrum(entry.matrix.to_matrix(weight.detach()))


def as_patterns(option: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the name patterns as a tuple. Refuses a single string, which would iterate over its letters."""
    if isinstance(patterns, str):
        raise TypeError(f"{option}={patterns!r}: give a list of patterns, {option}=[{patterns!r}]")
    return tuple(patterns)


def _matches(e: Entry, pattern: str) -> bool:
    return fnmatch.fnmatchcase(e.name, pattern) or fnmatch.fnmatchcase(e.layer, pattern)


def _check_patterns(entries: list[Entry], **options: Iterable[str]) -> None:
    for option, patterns in options.items():
        for pattern in patterns:
            if not any(_matches(e, pattern) for e in entries):
                names = ", ".join(e.name for e in entries[:6])
                names += ", …" if len(entries) > 6 else ""
                inside = f"{pattern}.*"
                hint = f"; for all layers inside {pattern} write {inside!r}"
                raise ValueError(
                    f"{option}: the pattern {pattern!r} matches no layer; the layers are {names}"
                    + hint * any(_matches(e, inside) for e in entries)
                )


def _select(
    e: Entry,
    rule: Rule,
    embed: Rule | None,
    keep: tuple[str, ...],
    only: tuple[str, ...],
    rules: Mapping[str, Rule],
    slow: bool,
) -> Entry:
    """Return the entry with its rule, or with the reason it stays dense."""
    if e.reason:
        return e
    for pattern in keep:
        if _matches(e, pattern):
            return e.keep_dense(f"kept by pattern {pattern!r}")
    if only and not any(_matches(e, pattern) for pattern in only):
        return e.keep_dense("not matched by `only`")
    if slow and not any(_matches(e, pattern) for pattern in (*only, *rules)):
        return e.keep_dense(
            "low rank is slower on CUDA here; naming it in only= or overrides= factorizes it, for fewer bytes"
        )
    if embed is not None and e.matrix is not None and e.matrix.lookup:
        rule = embed
    for pattern, special in rules.items():
        rule = special if _matches(e, pattern) else rule
    if isinstance(rule, Budget) and rule.unit == "macs" and e.matrix is not None and e.matrix.lookup:
        return e.keep_dense("a lookup has no MACs to save")
    return e.with_rule(rule)


def _slower_on_its_device(module: nn.Module) -> bool:
    kind = low_rank_type(type(module))
    return kind is not None and kind.slower_on_cuda and all(p.is_cuda for p in module.parameters())


def _shared_inputs(
    calls: Mapping[str, Call], modules: Mapping[str, nn.Module]
) -> tuple[tuple[str, ...], ...]:
    """Groups of linear layers that were called with the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, call in calls.items():
        kind = low_rank_type(type(modules[name])) if name in modules else None
        if kind is not None and issubclass(kind, LowRankLinear) and call.args:
            groups.setdefault(id(call.args[0]), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def apply_rules(plan: Plan, spectra: Mapping[str, Tensor] | None) -> Plan:
    """Replace rules by ranks: all of them if `spectra` are given, else those that do not need the weights."""
    entries = []
    for e in plan.entries:
        if e.rule is None or e.matrix is None:
            entries.append(e)
        elif not e.rule.needs_weights:
            entries.append(_with_rank(e, e.rule.rank(e.matrix, e.name, None), plan))
        elif not align(e.matrix.full_rank, e.matrix, plan.multiple if e.rule.aligned else 1, plan.min_saving):
            entries.append(_with_rank(e, 1, plan))  # stays dense whatever the spectrum is
        elif spectra is None or isinstance(e.rule, Budget):
            entries.append(e)
        else:
            entries.append(_with_rank(e, e.rule.rank(e.matrix, e.name, spectra[e.name]), plan))
    plan = plan.replace(_at_most(plan, entries))
    budgets = list(dict.fromkeys(e.rule for e in plan.entries if isinstance(e.rule, Budget)))
    if len(budgets) > 1:
        raise ValueError("a plan can have only one Budget; use Ratio or Fixed in overrides")
    if budgets and spectra is not None:
        plan = apply_budget(plan, budgets[0], spectra)
    return plan


def _with_rank(e: Entry, r: int, plan: Plan) -> Entry:
    """Return the entry at rank `r` after rounding, or with the reason why no rank saves enough."""
    assert e.matrix is not None
    assert e.rule is not None
    rounded = align(r, e.matrix, plan.multiple if e.rule.aligned else 1, plan.min_saving)
    if not e.rule.aligned and rounded < r and plan.min_saving >= 0:
        rounded = 0  # a fixed rank is not lowered
    if rounded:
        return e.with_rank(rounded)
    largest = largest_rank(e.matrix, plan.min_saving)
    smallest = plan.multiple if e.rule.aligned and plan.multiple > 1 else max(r, 1)
    return e.keep_dense(f"not smaller at rank {smallest}: the largest that saves is {largest}")


def _at_most(plan: Plan, ranked: list[Entry]) -> list[Entry]:
    """Lower stable ranks, where those of `ranked` together keep a larger share of the weights than their rule allows."""
    groups: dict[float, list[Entry]] = {}
    for e, after in zip(plan.entries, ranked, strict=True):
        if isinstance(e.rule, StableRank) and after.rank:
            groups.setdefault(e.rule.at_most, []).append(after)
    lowered: dict[str, Entry] = {}
    for share, group in groups.items():
        if sum(e.after for e in group) > share * sum(e.before for e in group):
            lowered |= {e.name: _lowered(e, share, plan) for e in group}
    return [lowered.get(e.name, e) for e in ranked]


def _lowered(e: Entry, share: float, plan: Plan) -> Entry:
    assert e.matrix is not None
    assert e.rank is not None
    x = e.matrix
    most = align(int(share * x.m * x.n / (x.m + x.n)), x, plan.multiple, plan.min_saving)
    return dataclasses.replace(e.with_rank(min(e.rank, most)), asked=e.rank)
