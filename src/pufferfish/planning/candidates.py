"""`candidates`: one plan entry for every weight matrix of a model, with the reason where it cannot be factorized."""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..layers import LowRank, Matrix, low_rank_type
from ..layers.base import unfit_reason
from ..layers.names import join_name, named_modules, own_name, unwrap
from .plan import Entry
from .profile import Call, Profile

Owners = dict[int, list[str]]  # names of each parameter, by its id

DEPTHWISE = "depthwise"
_LOOKUP = "embedding: a lookup, not a product"


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
        kind = low_rank_type(type(module))
        if parent is not None and (kind is None or not owned[parent]):
            if owned[parent]:
                entries += _uncovered(name, module, owned[parent], owners)
            continue
        if isinstance(module, LowRank):
            owned[path] = ""
            entries += _low_rank_entries(name, module)
            continue
        if "base_layer" in module._modules:
            owned[path] = f"wrapped by an adapter ({type(module).__name__}): merge it first"
        if kind is None:
            entries += _uncovered(name, module, "", owners, embed)
            if hasattr(module, "parametrizations"):
                owned[join_name(path, "parametrizations")] = ""  # the weight is computed from these
            continue
        if parent is None:
            owned.setdefault(path, "")
        layers[name] = module
        reason = (owned[parent] if parent is not None else "") or unfit_reason(module)
        if reason:
            entries += _uncovered(name, module, reason, owners)
            continue
        call = profiled.calls.get(name) if profiled else None
        for x in kind.matrices(module):
            e = _entry(name, module, x, call, owners)
            e = e if e.reason else e.keep_dense(_why_not(e, profiled, embed, frozen))
            if x.lookup and not embed:  # a plan without embeddings fits models with another vocabulary too
                e = replace(e, matrix=None, positions=None)
            entries.append(e)
    return entries, layers


def _why_not(e: Entry, profiled: Profile | None, embed: bool, frozen: bool) -> str:
    """Reason why a matrix that can be factorized stays dense; "" if it does not."""
    if profiled and e.layer in profiled.read_outside:
        return "its weight is used outside the layer too"
    if e.matrix is not None and e.matrix.lookup and not embed:
        return f"{_LOOKUP}; embed= (--embed) factorizes it"
    if not (e.trainable or frozen):
        return "frozen: training could not reduce its error; frozen=True (--frozen) factorizes it"
    return ""


def _entry(layer: str, module: nn.Module, matrix: Matrix, call: Call | None, owners: Owners) -> Entry:
    weight = module.get_parameter(matrix.weight)
    e = Entry(
        name=join_name(layer, matrix.name),
        layer=layer,
        type=type(module).__name__,
        shape=matrix.shape,
        matrix=matrix,
        held=_held(weight, join_name(layer, matrix.weight), owners),
        itemsize=weight.element_size(),
        trainable=weight.requires_grad,
        positions=call.positions.get(matrix.name) if call else None,
        grad_positions=call.grad_positions.get(matrix.name) if call else None,
    )
    # A bias that is split (attention has three in one) must not be tied either.
    for tensor in (matrix.weight, matrix.bias) if matrix.bias and matrix.dense else (matrix.weight,):
        for other in owners[id(module.get_parameter(tensor))]:
            if other != join_name(layer, tensor):
                return e.keep_dense(f"tied weight: shared with {other}")
    if matrix.blocks > 1 and getattr(module, "groups", None) == getattr(module, "in_channels", 0):
        return e.keep_dense(DEPTHWISE)
    return e


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


def _owners(model: nn.Module) -> Owners:
    """Names of each parameter, by its id. More than one name means that it is tied."""
    owners: Owners = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(own_name(name))
    return owners


def _held(parameter: nn.Parameter, name: str, owners: Owners) -> int | None:
    """0 for a parameter that an earlier entry counts under another name, or that has no shape yet; else None."""
    return 0 if is_lazy(parameter) or owners[id(parameter)][0] != name else None


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


def _uncovered(name: str, module: nn.Module, reason: str, owners: Owners, embed: bool = False) -> list[Entry]:
    """Return entries for the matrices of a module that stay dense, with the reason."""
    entries = []
    kind = type(module).__name__
    for tensor, parameter in module.named_parameters(recurse=False):
        lazy = is_lazy(parameter)
        if not tensor.startswith("weight") if lazy else parameter.dim() < 2:
            continue
        is_weight = tensor.startswith("weight") or bool(reason)
        own = join_name(name, tensor)
        others = [other for other in owners[id(parameter)] if other != own]
        note = ""
        if reason:
            why = reason
        elif lazy:
            why = "lazy: run one batch through the model first"
        elif others and is_weight:
            why = f"tied weight: shared with {others[0]}"
        elif isinstance(module, nn.EmbeddingBag) or (isinstance(module, nn.Embedding) and not embed):
            why = _LOOKUP
        elif is_weight:
            why = f"no low-rank form is registered for {kind}"
            note = _register_line(module)
        else:
            why = "raw parameter: used by the module's own code, not covered"
            if parameter.dim() == 3:
                why += "; for a stack of experts see pufferfish.layers.LowRankExperts"
        entries.append(
            Entry(
                name=name if tensor == "weight" else join_name(name, tensor),
                layer=name,
                type=kind if is_weight else "Parameter",
                shape=() if lazy else tuple(parameter.shape),
                held=_held(parameter, own, owners),
                itemsize=parameter.dtype.itemsize,
                trainable=parameter.requires_grad,
                reason=why,
                note=note,
            )
        )
    if hasattr(module, "parametrizations") and kind.startswith("Parametrized"):
        for tensor, chain in module.parametrizations.items():  # type: ignore[union-attr,operator]
            original = next(iter(chain.parameters()))
            entries.append(
                Entry(
                    name=name if tensor == "weight" else join_name(name, tensor),
                    layer=name,
                    type=kind.removeprefix("Parametrized"),
                    shape=tuple(getattr(module, tensor).shape),
                    itemsize=original.element_size(),
                    trainable=original.requires_grad,
                    reason="parametrized: remove the parametrization first",
                )
            )
    return entries
