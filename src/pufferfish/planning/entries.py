"""Which layers become low-rank: an `Entry` for every weight matrix, with the reason where it stays dense."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..layers import LowRank, Matrix, low_rank_type
from ..layers.base import unfit_reason
from ..layers.names import join_name, named_modules, own_name, unwrap
from .profile import Profile
from .rules import Budget, Rule

Owners = dict[int, list[str]]  # names of each parameter, by its id

_LOOKUP = "embedding: a lookup, not a product"
_UNREGISTERED = "no low-rank form is registered"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One matrix of one layer: its rank, the rule that will choose its rank, or the reason it stays dense."""

    name: str  # name of the layer, and of the matrix where a layer has several: "lstm.weight_ih_l0"
    layer: str
    type: str  # class name of the layer
    shape: tuple[int, ...]  # of the weight
    matrix: Matrix | None = None  # None: the layer cannot be factorized
    rank: int | None = None
    asked: int | None = None  # rank before `at_most` lowered it
    rule: Rule | None = None
    reason: str = ""
    note: str = ""  # remark about the rank, or how to register the layer's type; shown in the printed plan
    held: int | None = None  # number of weights if not that of `shape` (already low-rank, lazy, tied)
    itemsize: int = 4
    trainable: bool = True
    positions: int | None = None  # number of vectors multiplied by the matrix in the example
    grad_positions: int | None = None  # number of these whose gradient is computed in backward
    ms: tuple[float, float] | None = None  # measured time of the whole layer in a step, dense and low-rank
    error: float | None = None  # relative error ‖W − UV‖ / ‖W‖, set by `factorize_`

    def __post_init__(self) -> None:
        if self.rank is not None:
            full = self.matrix.full_rank if self.matrix else 0
            if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 1 <= self.rank <= full:
                raise ValueError(f"{self.name}: rank {self.rank!r} is not a whole number from 1 to {full}")

    @property
    def before(self) -> int:
        """Number of weights in the current model."""
        return math.prod(self.shape) if self.held is None else self.held

    @property
    def after(self) -> int:
        """Number of weights at the planned rank."""
        if self.rank is None or self.matrix is None:
            return self.before
        return self.matrix.factor_numel(self.rank)

    def macs(self, low_rank: bool) -> tuple[int, int]:
        """Forward and backward MACs on the example (0 if the example does not use the layer)."""
        if self.matrix is None or not self.positions:
            return 0, 0
        x, p = self.matrix, self.positions
        input_grads = p if self.grad_positions is None else self.grad_positions
        weight_grads = p if self.trainable else 0
        if not low_rank or self.rank is None:
            weights = 0 if x.lookup else x.used_blocks * x.m * x.n
            return p * weights, (weight_grads + input_grads) * weights
        down, up = (x.used_blocks * self.rank * side for side in (0 if x.lookup else x.n, x.m))
        # The gradient between the factors is needed for the layer's input and for `down` itself.
        inner_grads = max(weight_grads, input_grads)
        return p * (down + up), (weight_grads + input_grads) * down + (weight_grads + inner_grads) * up

    def keep_dense(self, reason: str) -> Entry:
        """Return the entry without a rank."""
        return dataclasses.replace(self, rank=None, rule=None, reason=reason, note="")

    def with_rule(self, rule: Rule) -> Entry:
        """Return the entry with a rule that chooses its rank later."""
        return dataclasses.replace(self, rank=None, rule=rule, reason="", note=rule.note(self.name))

    def with_rank(self, rank: int) -> Entry:
        """Return the entry with this rank."""
        return dataclasses.replace(self, rank=rank, rule=None, reason="")


def candidates(
    model: nn.Module, profiled: Profile | None, *, embed: bool = False, frozen: bool = False
) -> tuple[list[Entry], dict[str, nn.Module]]:
    """Return the entries of all matrices in the model's order, and the layers that they belong to by name.

    Args:
        embed: Whether embeddings can be factorized.
        frozen: Whether weights that do not require a gradient can be factorized.
    """
    owners = _owners(model)
    entries: list[Entry] = []
    layers: dict[str, nn.Module] = {}
    # Paths of modules whose children get no entries of their own, with the reason for those that do. A registered
    # layer covers its children; the layers inside an adapter stay dense.
    owned: dict[str, str] = {}
    for name, path, module in named_modules(model):
        parent = next((p for p in owned if path.startswith(f"{p}.") or p == ""), None)
        covered = parent is not None and not owned[parent]
        kind = None if covered else low_rank_type(type(module))
        if kind is not None:
            layers[name] = module
        if parent is not None:
            entries += [] if covered else _uncovered(name, module, owned[parent], owners)
        elif isinstance(module, LowRank):
            owned[path] = ""
            entries += _low_rank_entries(name, module)
        elif kind is None:
            entries += _uncovered(name, module, "", owners, embed)
            if hasattr(module, "parametrizations"):
                owned[join_name(path, "parametrizations")] = ""  # the weight is computed from these
        else:
            owned[path] = ""
            if reason := unfit_reason(module):
                entries += _uncovered(name, module, reason, owners)
            else:
                entries += _covered(name, module, kind.matrices(module), owners, profiled, embed, frozen)
        if parent is None and "base_layer" in module._modules:
            owned[path] = f"wrapped by an adapter ({type(module).__name__}): merge it first"
    return entries, layers


def _owners(model: nn.Module) -> Owners:
    """Names of each parameter, by its id. More than one name means that it is tied."""
    owners: Owners = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(own_name(name))
    return owners


def _low_rank_entries(layer: str, module: LowRank) -> list[Entry]:
    return [
        Entry(
            name=join_name(layer, x.name),
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
    frozen: bool,
) -> list[Entry]:
    """Entries for the matrices of a layer of a registered type."""
    call = profiled.calls.get(layer) if profiled else None
    outside = profiled is not None and layer in profiled.read_outside
    entries = []
    for x in matrices:
        weight = module.get_parameter(x.weight)
        left_out = x.lookup and not embed  # a plan without embeddings fits models with another vocabulary too
        entries.append(
            Entry(
                name=join_name(layer, x.name),
                layer=layer,
                type=type(module).__name__,
                shape=x.shape,
                matrix=None if left_out else x,
                reason=_why_dense(layer, module, x, owners, outside, embed, frozen),
                held=_held(weight, join_name(layer, x.weight), owners),
                itemsize=weight.element_size(),
                trainable=weight.requires_grad,
                positions=call.positions.get(x.name) if call and not left_out else None,
                grad_positions=call.grad_positions.get(x.name) if call else None,
            )
        )
    return entries


def _why_dense(
    layer: str, module: nn.Module, matrix: Matrix, owners: Owners, outside: bool, embed: bool, frozen: bool
) -> str:
    """Reason why a matrix of a registered type stays dense; "" if it can be factorized."""
    # A bias that is split (attention has three in one) must not be tied either.
    for tensor in (matrix.weight, matrix.bias) if matrix.bias and matrix.dense else (matrix.weight,):
        for other in owners[id(module.get_parameter(tensor))]:
            if other != join_name(layer, tensor):
                return f"tied weight: shared with {other}"
    if matrix.blocks > 1 and getattr(module, "groups", None) == getattr(module, "in_channels", 0):
        return "depthwise"
    if outside:
        return "its weight is used outside the layer too"
    if matrix.lookup and not embed:
        return f"{_LOOKUP}; embed= (--embed) factorizes it"
    if not (module.get_parameter(matrix.weight).requires_grad or frozen):
        return "frozen: training could not reduce its error; frozen=True (--frozen) factorizes it"
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
        own = join_name(layer, tensor)
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
    if hasattr(module, "parametrizations") and kind.startswith("Parametrized"):
        for tensor, chain in module.parametrizations.items():  # type: ignore[union-attr,operator]
            original = next(iter(chain.parameters()))
            entries.append(
                Entry(
                    name=layer if tensor == "weight" else join_name(layer, tensor),
                    layer=layer,
                    type=kind.removeprefix("Parametrized"),
                    shape=tuple(getattr(module, tensor).shape),
                    itemsize=original.element_size(),
                    trainable=original.requires_grad,
                    reason="parametrized: remove the parametrization first",
                )
            )
    return entries


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


def select(
    entries: list[Entry],
    layers: Mapping[str, nn.Module],
    rule: Rule,
    *,
    embed: Rule | None,
    keep: Iterable[str],
    only: Iterable[str],
    overrides: Mapping[str, Rule],
) -> list[Entry]:
    """Give the entries that become low-rank their rule, and the others a reason. For the arguments see `plan`."""
    _check_patterns(entries, keep=keep, only=only, overrides=overrides)
    slow = {name for name, layer in layers.items() if _slower_on_its_device(layer)}
    by_lookup = {False: rule, True: embed or rule}
    selected = []
    for e in entries:
        if not e.reason:
            assert e.matrix is not None
            lookup = e.matrix.lookup
            kept, special = _matching(e, keep), _matching(e, overrides)
            chosen = overrides[special[-1]] if special else by_lookup[lookup]
            if kept:
                e = e.keep_dense(f"kept by pattern {kept[0]!r}")
            elif only and not _matching(e, only):
                e = e.keep_dense("not matched by `only`")
            elif e.layer in slow and not (only or special):
                e = e.keep_dense(
                    "low rank is slower on CUDA here; naming it in only= or overrides= factorizes it, for fewer bytes"
                )
            elif isinstance(chosen, Budget) and chosen.unit == "macs" and lookup:
                e = e.keep_dense("a lookup has no MACs to save")
            else:
                e = e.with_rule(chosen)
        selected.append(e)
    return selected


def as_patterns(option: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the name patterns as a tuple. Refuses a single string, which would iterate over its letters."""
    if isinstance(patterns, str):
        raise TypeError(f"{option}={patterns!r}: give a list of patterns, {option}=[{patterns!r}]")
    return tuple(patterns)


def _check_patterns(entries: list[Entry], **options: Iterable[str]) -> None:
    for option, patterns in options.items():
        for pattern in patterns:
            if not any(_matching(e, [pattern]) for e in entries):
                names = ", ".join(e.name for e in entries[:6])
                names += ", …" if len(entries) > 6 else ""
                inside = f"{pattern}.*"
                hint = f"; for all layers inside {pattern} write {inside!r}"
                raise ValueError(
                    f"{option}: the pattern {pattern!r} matches no layer; the layers are {names}"
                    + hint * any(_matching(e, [inside]) for e in entries)
                )


def _slower_on_its_device(layer: nn.Module) -> bool:
    kind = low_rank_type(type(layer))
    return kind is not None and kind.slower_on_cuda and all(p.is_cuda for p in layer.parameters())


def _matching(e: Entry, patterns: Iterable[str]) -> list[str]:
    """The patterns that match the name of the entry or of its layer."""
    names = e.name, e.layer
    return [p for p in patterns if any(fnmatch.fnmatchcase(name, p) for name in names)]
