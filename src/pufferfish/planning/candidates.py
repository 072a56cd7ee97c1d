"""The layers of a model that could be made low-rank, and why the others cannot. Nothing is passed over."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..layers import LowRank, Matrix, low_rank_type
from ..layers.names import named_modules, own_name, unwrap
from .plan import Entry
from .profile import Call, Profile

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def candidates(model: nn.Module, seen: Profile | None) -> tuple[list[Entry], dict[str, nn.Module]]:
    """Every matrix of every layer that has one, in the model's order; and the layers by name."""
    owners = _owners(model)
    entries: list[Entry] = []
    layers: dict[str, nn.Module] = {}
    owned: dict[str, str] = {}  # a registered parent owns its children; an adapter keeps its own
    for name, path, module in named_modules(model):
        parent = next((p for p in owned if path.startswith(f"{p}.") or p == ""), None)
        kind = low_rank_type(type(module))
        if parent is not None and (kind is None or not owned[parent]):
            if owned[parent]:
                entries += _uncovered(name, module, owned[parent])
            continue
        if isinstance(module, LowRank):
            owned[path] = ""
            entries += _already(name, module)
            continue
        if "base_layer" in module._modules:
            owned[path] = f"wrapped by an adapter ({type(module).__name__}): merge it first"
        if kind is None:
            entries += _uncovered(name, module, "")
            if hasattr(module, "parametrizations"):
                owned[_dotted(path, "parametrizations")] = ""  # what its weight is computed from
            continue
        if parent is None:
            owned.setdefault(path, "")
        layers[name] = module
        reason = (owned[parent] if parent is not None else "") or unfit(module)
        if reason:
            entries += _uncovered(name, module, reason)
            continue
        call = seen.calls.get(name) if seen else None
        found = [_entry(name, module, x, call, owners) for x in kind.matrices(module)]
        if seen and name in seen.read:
            found = [e if e.reason else e.stays("its weight is used outside the layer too") for e in found]
        entries += found
    return entries, layers


def _entry(
    layer: str, module: nn.Module, matrix: Matrix, call: Call | None, owners: dict[int, list[str]]
) -> Entry:
    weight = module.get_parameter(matrix.weight)
    e = Entry(
        name=".".join(x for x in (layer, matrix.name) if x),
        layer=layer,
        type=type(module).__name__,
        shape=matrix.shape,
        matrix=matrix,
        itemsize=weight.element_size(),
        trainable=weight.requires_grad,
        positions=call.positions.get(matrix.name) if call else None,
        grad_positions=call.grad_positions.get(matrix.name) if call else None,
    )
    # A bias that is taken apart (three in one in attention) must not be shared either.
    for tensor in (matrix.weight, matrix.bias) if matrix.bias and matrix.dense else (matrix.weight,):
        for other in owners[id(module.get_parameter(tensor))]:
            if other != _dotted(layer, tensor):
                return e.stays(f"tied weight: shared with {other}")
    if matrix.blocks > 1 and _depthwise(module):
        return e.stays("depthwise")
    return e


def _already(layer: str, module: LowRank) -> list[Entry]:
    return [
        Entry(
            name=_dotted(layer, x.name) if x.name else layer,
            layer=layer,
            type=type(module).__name__,
            shape=x.shape,
            held=down.numel() + up.numel(),
            itemsize=down.element_size(),
            trainable=down.requires_grad,
            reason=f"low-rank already, rank {module.ranks[x.name]}",
        )
        for x, (down, up) in module.factors().items()
    ]


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _depthwise(module: nn.Module) -> bool:
    return getattr(module, "groups", None) == getattr(module, "in_channels", 0)


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Under which names each parameter is found: more than one means tied."""
    owners: dict[int, list[str]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(own_name(name))
    return owners


def unfit(module: nn.Module) -> str:
    """Why a layer of a registered type cannot be factorized as it stands."""
    if "forward" in vars(module):
        return "unsupported: its forward was replaced"
    for child in module.modules():
        if hasattr(child, "parametrizations"):
            return "parametrized: remove the parametrization first"
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and any(x.startswith(f"{name}_") for x in child._parameters):
                return f"unsupported: its {name} is computed (weight_norm, spectral_norm, pruning)"
    for parameter in module.parameters():
        if is_lazy(parameter):
            return "lazy: run one batch through the model first"
        if parameter.dtype not in _FLOATS:
            return f"quantized or unusual dtype {str(parameter.dtype).removeprefix('torch.')}"
        if type(parameter.data) is not Tensor and type(parameter.data).__name__ != "DTensor":
            return f"unsupported: its weight is a {type(parameter.data).__name__}, not a plain tensor"
    return ""


def _uncovered(name: str, module: nn.Module, reason: str) -> list[Entry]:
    """Entries for the matrices that no low-rank layer will replace, so that nothing is passed over."""
    found = []
    kind = type(module).__name__
    parametrized = hasattr(module, "parametrizations")
    for tensor, parameter in module.named_parameters(recurse=False):
        lazy = is_lazy(parameter)
        if not tensor.startswith("weight") if lazy else parameter.dim() < 2:
            continue
        whole = tensor.startswith("weight") or bool(reason)
        if reason:
            why = reason
        elif lazy:
            why = "lazy: run one batch through the model first"
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            why = "embedding: a lookup, not a product"
        elif whole:
            why = f"unsupported: no low-rank form is registered for {kind}"
        else:
            why = "raw parameter: used by the module's own code, not covered"
        found.append(
            Entry(
                name=name if tensor == "weight" else _dotted(name, tensor),
                layer=name,
                type=kind if whole else "Parameter",
                shape=() if lazy else tuple(parameter.shape),
                held=0 if lazy else None,
                itemsize=parameter.dtype.itemsize,
                trainable=parameter.requires_grad,
                reason=why,
            )
        )
    if type(module).__module__.startswith("torch.ao.nn.") and callable(getattr(module, "weight", None)):
        shape = tuple(module.weight().shape)  # type: ignore[operator]
        found.append(Entry(name=name, layer=name, type=kind, shape=shape, held=0, reason="quantized"))
    if parametrized and type(module).__name__.startswith("Parametrized"):
        for tensor, chain in module.parametrizations.items():  # type: ignore[union-attr,operator]
            original = next(iter(chain.parameters()))
            found.append(
                Entry(
                    name=name if tensor == "weight" else _dotted(name, tensor),
                    layer=name,
                    type=kind.removeprefix("Parametrized"),
                    shape=tuple(getattr(module, tensor).shape),
                    itemsize=original.element_size(),
                    trainable=original.requires_grad,
                    reason="parametrized: remove the parametrization first",
                )
            )
    return found
