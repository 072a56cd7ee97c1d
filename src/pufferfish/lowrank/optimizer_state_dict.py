"""`convert_optimizer`: an optimizer's state dict converted together with the state dict of its model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..layers.names import own_name
from ..optim.carry import State, can_carry, dense_state, factor_state
from ..planning.plan import Plan
from .state_dict import FactorizedLayer, Source, factorized_layers, keys_by_name


def convert_optimizer(
    saved: dict[str, Any], dense: Source, low_rank: Source, plan: Plan, *, back: bool = False
) -> dict[str, Any]:
    """Convert an optimizer's `state_dict()` from a dense to a low-rank model, or back.

    It numbers the parameters. Their names are known if the optimizer was built with `named_parameters()`; otherwise
    the numbers must follow the order of the model's parameters.

    Args:
        saved: the optimizer's state dict before the conversion.
        dense: state dict of the dense model.
        low_rank: state dict of the low-rank model.
        plan: with all ranks.
        back: convert from low-rank to dense.
    """
    dense_keys, low_rank_keys = keys_by_name(dense), keys_by_name(low_rank)
    before, after = list(plan.parameters), low_rank_names(plan)
    before, after = (after, before) if back else (before, after)
    old, old_keys = (low_rank, low_rank_keys) if back else (dense, dense_keys)
    names = _names_by_number(
        saved, {name: old.shapes[old_keys[name]][0] for name in before if name in old_keys}
    )

    # By old name: the layer, the dense parameter in it, and the new names.
    replaced: dict[str, tuple[FactorizedLayer, str, list[str]]] = {}
    layers = [
        _without_wrappers(layer) for layer in factorized_layers(plan, {n: n for n in before}, low_rank=back)
    ]
    for layer in layers:
        for part, parts in layer.mapping.targets.items():
            olds, news = (parts, [part]) if back else ([part], parts)
            replaced |= {layer.key(old): (layer, part, [layer.key(new) for new in news]) for old in olds}

    states = {names[i]: state for i, state in saved["state"].items()}
    carried: dict[str, State] = {}
    for name, state in states.items():
        if name not in replaced:
            carried[name] = state
            continue
        layer, part, news = replaced[name]
        mapping = layer.mapping
        for x, parts in mapping.targets.items():
            if x == part:
                mapping.dense = {x: dense.get(dense_keys[layer.key(x)])}
                mapping.low_rank = {p: low_rank.get(low_rank_keys[layer.key(p)]) for p in parts}
        if not all(
            can_carry(states.get(layer.key(p), {"": 0})) for p in (mapping.targets[part] if back else [part])
        ):
            continue  # carry all state of a parameter or none
        if not back:
            carried |= {layer.key(k): s for k, s in factor_state(mapping, part, state).items()}
        elif news[0] not in carried:
            pieces = {p: states[layer.key(p)] for p in mapping.targets[part]}
            carried[news[0]] = dense_state(mapping, part, pieces)

    changed, changed_keys = (dense, dense_keys) if back else (low_rank, low_rank_keys)
    groups = []
    numbers: dict[str, int] = {}
    for group in saved["param_groups"]:
        had = [names[i] for i in group["params"]]
        new = list(
            dict.fromkeys(n for name in had for n in (replaced[name][2] if name in replaced else [name]))
        )
        if back:  # if another optimizer has the first factor, it gets the weight
            first = {x[2][0]: x[0].key(x[0].mapping.targets[x[1]][0]) for x in replaced.values()}
            new = [name for name in new if name not in first or first[name] in names.values()]
        for name in new:
            if "ns_steps" in group and len(changed.shapes[changed_keys[name]][0]) != 2:
                raise ValueError(
                    f"{name}: Muon takes matrices only, so this factor would belong to another optimizer; convert the "
                    "file without optimizer state, or load it and call pf.factorize_ with both optimizers"
                )
        if had == sorted(had, key=before.index):
            new.sort(key=after.index)
        numbers |= {name: len(numbers) + i for i, name in enumerate(new)}
        extra = {"param_names": new} if "param_names" in group else {}
        groups.append({**group, "params": [numbers[name] for name in new], **extra})
    kept = {numbers[name]: state for name, state in carried.items() if name in numbers}
    return {**saved, "state": kept, "param_groups": groups}


def low_rank_names(plan: Plan) -> list[str]:
    """Names of the low-rank model's parameters, in its order.

    A module lists its own parameters before those of its children, so inside a layer names without a dot come first,
    then the others child by child.
    """
    keys = {name: name for name in plan.parameters}
    owner: dict[str, tuple[FactorizedLayer, str]] = {}
    for layer in map(_without_wrappers, factorized_layers(plan, keys)):
        for name in plan.parameters:
            if name.startswith(layer.prefix):
                owner[name] = layer, name.removeprefix(layer.prefix)
    names: list[str] = []
    done = set()
    for name in plan.parameters:
        if name not in owner:
            names.append(name)
            continue
        layer = owner[name][0]
        if layer.prefix in done:
            continue
        done.add(layer.prefix)
        parts = layer.mapping.targets
        inside = [part for own, (x, part) in owner.items() if x is layer]
        flat = [new for part in inside for new in parts.get(part, [part])]
        children = list(dict.fromkeys(n.split(".")[0] for n in flat if "." in n))
        flat.sort(key=lambda n: (1, children.index(n.split(".")[0])) if "." in n else (0, 0))
        names += [layer.key(n) for n in flat]
    return names


def _without_wrappers(layer: FactorizedLayer) -> FactorizedLayer:
    name = layer.entries[0].layer
    return FactorizedLayer(f"{name}." if name else "", layer.entries, {})


def _names_by_number(saved: dict[str, Any], shapes: Mapping[str, torch.Size]) -> dict[int, str]:
    """Names of the parameters by number. `shapes` are those of the model's parameters, in their order.

    If the groups have no names, each group is assumed to follow the model's order. Then the next parameter of the
    model must be, by its shape, the next one of exactly one group.
    """
    names = [own_name(n) for group in saved["param_groups"] for n in group.get("param_names", ())]
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    if len(names) == len(numbers):
        return dict(zip(numbers, names, strict=True))
    remaining = [list(group["params"]) for group in saved["param_groups"]]
    matched: dict[int, str] = {}
    for name, shape in shapes.items():
        fitting = [
            group for group in remaining if group and _shape_of(saved["state"].get(group[0])) in (None, shape)
        ]
        if len(fitting) == 1:
            matched[fitting[0].pop(0)] = name
    if len(matched) != len(numbers) or len(matched) != len(shapes):
        raise ValueError(
            "the optimizer state cannot be matched to the parameters: its groups have no names and do not follow the "
            "order of the model's parameters; build the optimizer with model.named_parameters(), or remove its state"
        )
    return matched


def _shape_of(state: State | None) -> torch.Size | None:
    values = (state or {}).values()
    return next((v.shape for v in values if isinstance(v, Tensor) and v.dim()), None)
