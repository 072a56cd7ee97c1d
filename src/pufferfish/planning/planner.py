"""`plan`: which layer of a model becomes low-rank, at which rank, and why; `resolve` and `spectra`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..layers import LowRank, LowRankLinear, Matrix, low_rank_type, named_modules, own_name, unwrap
from ..layers.base import unfit_reason
from . import svd
from .entries import Entry, Plan, Totals, check_is_plan
from .profile import Example, Profile, profile
from .rules import RankLike, apply_rules, select
from .text import track
from .timing import Mode, Timing, as_timing, with_measured_times

Owners = dict[int, list[str]]  # names of each parameter, by its id

_LOOKUP = "embedding: a lookup, not a product"
_UNREGISTERED = "no low-rank form is registered"


def plan(
    model: nn.Module,
    rank: RankLike = 0.25,
    *,
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    overrides: Mapping[str, RankLike] | None = None,
    embed: RankLike | None = None,
    example: Example | None = None,
    measure: Timing | Mode | bool | None = None,
) -> Plan:
    """Plan which layers of a model become low-rank. Changes nothing.

    Args:
        rank: A float in (0, 1) is a share of each layer's full rank, an int a fixed rank, or a rule:
            `Ratio`, `Fixed`, `Energy`, `StableRank`, `Budget`. Ranks that a rule computes are multiples of 16, or of
            its `multiple`. Rules that need the weights choose ranks when the plan is applied;
            `resolve(plan, model)` shows what they choose for the current weights.
        keep: Patterns (`fnmatch`) of names of layers, or of modules around them, that stay dense.
        only: Such patterns; if given, all other layers stay dense.
        overrides: Pattern → rank for some layers; the last match applies. A layer whose weights do not require a
            gradient becomes low-rank only so: it saves no gradient bytes, and training cannot reduce its error.
        embed: Rank or rule for `nn.Embedding` layers, which stay dense without it. It pays for large vocabularies.
        example: A batch (tensor, tuple of arguments, dict of keyword arguments) or a function that runs the
            model. Needed for MACs and for `measure`.
        measure: Time the layers dense and low-rank on the model's device, in the mode that the job runs in, and keep
            those dense that would be slower: "eager" (or True), "compile" or "graph". Graphs and compiled graphs
            have no launch overhead, which outweighs the gain of small layers on a fast GPU. None is "eager" for a
            model on CUDA with an example, and False otherwise. It is also False in a job with several workers, which
            could decide differently: there, set it for the plan of a `Switch`, which makes them agree, or load one
            plan on all. `pufferfish.planning.Timing` also weighs the bytes that a layer sends.

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
    if embed is not None and not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise ValueError("embed: the model has no nn.Embedding; remove embed=")
    keep, only = as_patterns("keep", keep), as_patterns("only", only)
    timing = as_timing(measure, model, example) if measure or example is not None else None
    profiled = None if example is None else profile(model, example)
    entries, layers = candidates(model, profiled, embed=embed is not None)
    before, shared_inputs = totals(model, profiled), _shared_inputs(profiled, layers)
    entries = select(entries, layers, rank, embed=embed, keep=keep, only=only, overrides=overrides or {})
    plan = Plan(
        entries=tuple(entries),
        before=before,
        parameters=tuple(own_name(name) for name, _ in unwrap(model).named_parameters()),
        functional=profiled.functional if profiled else {},
        shared_inputs=shared_inputs,
    )
    plan = apply_rules(plan, None)
    if timing is None or profiled is None or example is None:
        return plan
    return with_measured_times(plan, model, layers, profiled, example, timing)


def as_patterns(option: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the name patterns as a tuple. Refuses a single string, which would iterate over its letters."""
    if isinstance(patterns, str):
        raise TypeError(f"{option}={patterns!r}: give a list of patterns, {option}=[{patterns!r}]")
    return tuple(patterns)


def candidates(
    model: nn.Module, profiled: Profile | None, *, embed: bool
) -> tuple[list[Entry], dict[str, nn.Module]]:
    """Return the entries of all matrices in the model's order, and the layers that they belong to by name.

    Args:
        embed: Whether embeddings can be factorized.
    """
    modules = list(_uncovered_modules(model))
    owners: Owners = {}
    for tensor, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(own_name(tensor))
    entries: list[Entry] = []
    layers: dict[str, nn.Module] = {}
    for name, module, reason in modules:
        kind = low_rank_type(type(module))
        if kind is not None:
            layers[name] = module
            reason = reason or unfit_reason(module)
        if isinstance(module, LowRank) and not reason:
            entries += _low_rank_entries(name, module)
        elif kind is not None and not reason:
            entries += _covered(name, module, kind.matrices(module), owners, profiled, embed)
        elif module._parameters or hasattr(module, "parametrizations"):
            entries += _uncovered(name, module, reason, owners, embed)
    return entries, layers


def _uncovered_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules whose matrices may have entries, with the reason why those inside an adapter stay dense."""
    # Modules whose children get no entries of their own ("": a registered layer covers its children), or are inside an
    # adapter.
    owners: dict[str, str] = {}
    for name, _, module in named_modules(model):
        inside = (why for owner, why in owners.items() if not owner or name.startswith(f"{owner}."))
        reason = next(inside, None)
        if reason == "":
            continue
        yield name, module, reason or ""
        if reason:
            continue
        if isinstance(module, LowRank) or low_rank_type(type(module)):
            owners[name] = ""
        if hasattr(module, "parametrizations"):
            owners[own_name(name, "parametrizations")] = ""  # the weight is computed from these
        if "base_layer" in module._modules:
            owners[name] = f"wrapped by an adapter ({type(module).__name__}): merge it first"


def _low_rank_entries(layer: str, module: LowRank) -> list[Entry]:
    return [
        Entry(
            name=own_name(layer, x.name),
            layer=layer,
            type=type(module).__name__,
            shape=x.shape,
            held=down.numel() + up.numel(),
            itemsize=down.element_size(),
            trainable=down.requires_grad,
            reason=f"already low-rank, rank {module.ranks[x.name]}",
        )
        for x, (down, up) in module.factors().items()
    ]


def _covered(
    layer: str,
    module: nn.Module,
    matrices: Iterable[Matrix],
    owners: Owners,
    profiled: Profile | None,
    embed: bool,
) -> list[Entry]:
    """Entries for the matrices of a layer of a registered type."""
    call = profiled.calls.get(layer) if profiled else None
    outside = profiled is not None and layer in profiled.read_outside
    entries = []
    for x in matrices:
        weight = module.get_parameter(x.weight)
        left_out = x.lookup and not embed  # a plan without embeddings fits models with another vocabulary too
        # The MACs of an operator that the counter does not know are in no total, so none may be subtracted.
        counted = profiled is not None and not left_out and (profiled.counted[layer] > 0 or x.lookup)
        entries.append(
            Entry(
                name=own_name(layer, x.name),
                layer=layer,
                type=type(module).__name__,
                shape=x.shape,
                matrix=None if left_out else x,
                reason=_why_dense(layer, module, x, owners, outside, embed),
                held=_held(weight, own_name(layer, x.weight), owners),
                itemsize=weight.element_size(),
                trainable=weight.requires_grad,
                positions=call.positions.get(x.name) if call and counted else None,
                grad_positions=call.grad_positions.get(x.name) if call else None,
            )
        )
    return entries


def _why_dense(
    layer: str, module: nn.Module, matrix: Matrix, owners: Owners, outside: bool, embed: bool
) -> str:
    """Reason why a matrix of a registered type stays dense; "" if it can be factorized."""
    # A bias that is split (attention has three in one) must not be tied either.
    for tensor in (matrix.weight, matrix.bias) if matrix.bias and matrix.dense else (matrix.weight,):
        for other in owners[id(module.get_parameter(tensor))]:
            if other != own_name(layer, tensor):
                return f"tied weight: shared with {other}"
    if matrix.blocks > 1 and getattr(module, "groups", None) == getattr(module, "in_channels", 0):
        return "depthwise"
    if outside:
        return "its weight is used outside the layer too"
    if matrix.lookup and not embed:
        return f"{_LOOKUP}; embed= (--embed) factorizes it"
    return ""


def _held(parameter: nn.Parameter, name: str, owners: Owners) -> int | None:
    """0 for a parameter that an earlier entry counts under another name, or that has no shape yet; else None."""
    return 0 if is_lazy(parameter) or owners[id(parameter)][0] != name else None


def _uncovered(
    layer: str, module: nn.Module, reason: str, owners: Owners, embed: bool = False
) -> list[Entry]:
    """Entries for the matrices of a module that stay dense, for a reason given or one of their own."""
    entries = []
    kind = type(module).__name__
    for tensor, parameter in module.named_parameters(recurse=False):
        lazy = is_lazy(parameter)
        if not tensor.startswith("weight") if lazy else parameter.dim() < 2:
            continue
        is_weight = tensor.startswith("weight") or bool(reason)
        own = own_name(layer, tensor)
        why = reason or _why_uncovered(own, module, parameter, is_weight, owners, embed)
        entries.append(
            Entry(
                name=layer if tensor == "weight" else own,
                layer=layer,
                type=kind if is_weight else "Parameter",
                shape=() if lazy else tuple(parameter.shape),
                held=_held(parameter, own, owners),
                itemsize=parameter.dtype.itemsize,
                trainable=parameter.requires_grad,
                reason=why,
                note=_register_line(module) if why.startswith(_UNREGISTERED) else "",
            )
        )
    parametrized = kind.startswith("Parametrized") and hasattr(module, "parametrizations")
    computed = module.parametrizations.items() if parametrized else ()  # type: ignore[union-attr,operator]
    originals = {tensor: next(iter(chain.parameters())) for tensor, chain in computed}
    return entries + [
        Entry(
            name=layer if tensor == "weight" else own_name(layer, tensor),
            layer=layer,
            type=kind.removeprefix("Parametrized"),
            shape=tuple(getattr(module, tensor).shape),
            itemsize=original.element_size(),
            trainable=original.requires_grad,
            reason="parametrized: remove the parametrization first",
        )
        for tensor, original in originals.items()
    ]


def _why_uncovered(
    own: str, module: nn.Module, parameter: nn.Parameter, is_weight: bool, owners: Owners, embed: bool
) -> str:
    """Reason why a matrix of an unregistered module, or a parameter beside its weights, stays dense."""
    if is_lazy(parameter):
        return "lazy: run one batch through the model first"
    others = [other for other in owners[id(parameter)] if other != own]
    if others and is_weight:
        return f"tied weight: shared with {others[0]}"
    if isinstance(module, nn.EmbeddingBag) or (isinstance(module, nn.Embedding) and not embed):
        return _LOOKUP
    if is_weight:
        return f"{_UNREGISTERED} for {type(module).__name__}"
    why = "raw parameter: used by the module's own code, not covered"
    stack = "; for a stack of experts see pufferfish.layers.LowRankExperts"
    return why + stack if parameter.dim() == 3 else why


def _register_line(module: nn.Module) -> str:
    """The line that registers a subclass of a registered type; "" if the layer is not one, or would not fit."""
    kind = type(module)
    base = next((x for x in kind.__mro__[1:] if issubclass(x, nn.Module) and low_rank_type(x)), None)
    # `fully_shard` makes subclasses too, whose parameters are DTensors.
    if base is None or unfit_reason(module) or any(type(p.data) is not Tensor for p in module.parameters()):
        return ""
    form = low_rank_type(base)
    assert form is not None
    place = "pf.layers" if form.__module__.startswith("pufferfish.layers.") else form.__module__
    what = " (x Wᵀ + b)" if base is nn.Linear else ""
    own = ""
    if kind.forward is not base.forward:
        own = f"{kind.__name__}.forward may cast or scale: then register a subclass of {place}.{form.__qualname__} that does so too. "
    return (
        f"{own}If {kind.__name__} computes the same as {base.__name__}{what}, register it: "
        f'pf.register("{kind.__module__}.{kind.__qualname__}", {place}.{form.__qualname__})'
    )


def totals(model: nn.Module, profile: Profile | None = None) -> Totals:
    """Count the parameters of a model, and its MACs if a `Profile` is given."""
    parameters = [p for p in unwrap(model).parameters() if not is_lazy(p)]
    trainable = [p for p in parameters if p.requires_grad]
    return Totals(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trainable),
        forward_macs=profile.forward_macs if profile else None,
        backward_macs=profile.backward_macs if profile else None,
    )


def _shared_inputs(profiled: Profile | None, modules: Mapping[str, nn.Module]) -> tuple[tuple[str, ...], ...]:
    """Groups of linear layers that were called with the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, call in profiled.calls.items() if profiled else ():
        kind = low_rank_type(type(modules[name])) if name in modules else None
        if kind is not None and issubclass(kind, LowRankLinear) and call.args:
            groups.setdefault(id(call.args[0]), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


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
    >>> {name: len(s) for name, s in pf.planning.spectra(nn.Sequential(nn.Linear(64, 32))).items()}
    {'0': 32}
    """
    found = track(factorizable(model, names), "computing singular values")
    return {e.name: matrix_spectrum(e, weight) for e, weight in found}


def factorizable(model: nn.Module, names: Iterable[str] | None = None) -> list[tuple[Entry, nn.Parameter]]:
    """Entries that can be factorized, with the parameter that holds each matrix; optionally only `names`."""
    entries, modules = candidates(model, None, embed=names is not None)
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
