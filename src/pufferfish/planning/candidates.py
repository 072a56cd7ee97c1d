"""`candidates`: one plan entry for every weight matrix of a model, with the reason where it cannot be factorized."""

from torch import nn
from torch.nn.parameter import is_lazy

from ..layers import LowRank, Matrix, low_rank_type
from ..layers.base import unfit_reason
from ..layers.names import join_name, named_modules, own_name, unwrap
from .plan import Entry
from .profile import Call, Profile


def candidates(model: nn.Module, profiled: Profile | None) -> tuple[list[Entry], dict[str, nn.Module]]:
    """Return the entries of all matrices in the model's order, and the layers that they belong to by name."""
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
                entries += _uncovered(name, module, owned[parent])
            continue
        if isinstance(module, LowRank):
            owned[path] = ""
            entries += _low_rank_entries(name, module)
            continue
        if "base_layer" in module._modules:
            owned[path] = f"wrapped by an adapter ({type(module).__name__}): merge it first"
        if kind is None:
            entries += _uncovered(name, module, "")
            if hasattr(module, "parametrizations"):
                owned[join_name(path, "parametrizations")] = ""  # the weight is computed from these
            continue
        if parent is None:
            owned.setdefault(path, "")
        layers[name] = module
        reason = (owned[parent] if parent is not None else "") or unfit_reason(module)
        if reason:
            entries += _uncovered(name, module, reason)
            continue
        call = profiled.calls.get(name) if profiled else None
        for x in kind.matrices(module):
            e = _entry(name, module, x, call, owners)
            if profiled and name in profiled.read_outside and not e.reason:
                e = e.keep_dense("its weight is used outside the layer too")
            entries.append(e)
    return entries, layers


def _entry(
    layer: str, module: nn.Module, matrix: Matrix, call: Call | None, owners: dict[int, list[str]]
) -> Entry:
    weight = module.get_parameter(matrix.weight)
    e = Entry(
        name=join_name(layer, matrix.name),
        layer=layer,
        type=type(module).__name__,
        shape=matrix.shape,
        matrix=matrix,
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
        return e.keep_dense("depthwise")
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


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Names of each parameter, by its id. More than one name means that it is tied."""
    owners: dict[int, list[str]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(own_name(name))
    return owners


def _uncovered(name: str, module: nn.Module, reason: str) -> list[Entry]:
    """Return entries for the matrices of a module that stay dense, with the reason."""
    entries = []
    kind = type(module).__name__
    for tensor, parameter in module.named_parameters(recurse=False):
        lazy = is_lazy(parameter)
        if not tensor.startswith("weight") if lazy else parameter.dim() < 2:
            continue
        is_weight = tensor.startswith("weight") or bool(reason)
        if reason:
            why = reason
        elif lazy:
            why = "lazy: run one batch through the model first"
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            why = "embedding: a lookup, not a product"
        elif is_weight:
            why = f"unsupported: no low-rank form is registered for {kind}"
        else:
            why = "raw parameter: used by the module's own code, not covered"
        entries.append(
            Entry(
                name=name if tensor == "weight" else join_name(name, tensor),
                layer=name,
                type=kind if is_weight else "Parameter",
                shape=() if lazy else tuple(parameter.shape),
                held=0 if lazy else None,
                itemsize=parameter.dtype.itemsize,
                trainable=parameter.requires_grad,
                reason=why,
            )
        )
    if type(module).__module__.startswith("torch.ao.nn.") and callable(getattr(module, "weight", None)):
        shape = tuple(module.weight().shape)  # type: ignore[operator]
        entries.append(Entry(name=name, layer=name, type=kind, shape=shape, held=0, reason="quantized"))
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
