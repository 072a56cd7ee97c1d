"""Optimizer state by parameter name, independent of the order in which an optimizer holds its parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn, optim

from ..layers import own_name, unwrap


def names_by_id(model: nn.Module) -> dict[int, str]:
    """Map id(parameter) to the parameter's own name."""
    return {id(p): own_name(name) for name, p in unwrap(model).named_parameters()}


def group_names(optimizer: optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the parameter names of each group. `names` come from `names_by_id`."""
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                shape = "×".join(map(str, p.shape)) or "single"
                raise ValueError(
                    f"{type(optimizer).__name__}, group {i}: it has a {shape} parameter that is not in the model; "
                    "put all trained parameters into one module, and create the optimizer from its parameters"
                )
        groups.append([names[id(p)] for p in group["params"]])
    return groups


def optimizer_state(optimizer: optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with parameter names instead of numbers."""
    state = optimizer.state_dict()
    by_number: dict[Any, str] = {}
    groups = []
    for group, named in zip(state["param_groups"], group_names(optimizer, names), strict=True):
        by_number |= dict(zip(group["params"], named, strict=True))
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({"params": named, "settings": settings})
    return {
        "type": type(optimizer).__name__,
        "groups": groups,
        "state": {by_number[k]: v for k, v in state["state"].items() if k in by_number},
        "unnamed": {k: v for k, v in state["state"].items() if k not in by_number},
        "rest": {k: v for k, v in state.items() if k not in ("state", "param_groups")},
    }


def check_optimizer(saved: Mapping[str, Any], kind: str, groups: Sequence[Sequence[str]]) -> None:
    """Raise ValueError unless `saved` belongs to an optimizer of class `kind` with these names in its groups."""
    if saved["type"] != kind:
        raise ValueError(f"the saved optimizer is {saved['type']}, this one is {kind}")
    if len(saved["groups"]) != len(groups):
        raise ValueError(f"the saved {kind} has {len(saved['groups'])} groups, this one has {len(groups)}")
    for i, (saved_group, names) in enumerate(zip(saved["groups"], groups, strict=True)):
        for name in sorted(set(saved_group["params"]) ^ set(names)):
            where = "saved" if name in saved_group["params"] else "current"
            raise ValueError(
                f"{kind}, group {i}: {name} is only in the {where} optimizer; create the groups as they were saved"
            )


def load_optimizer(optimizer: optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Load the result of `optimizer_state` into the optimizer, bit for bit."""
    numbers: dict[str, int] = {}
    groups = []
    for named, saved_group in zip(group_names(optimizer, names), saved["groups"], strict=True):
        numbers |= {name: len(numbers) + i for i, name in enumerate(named)}
        groups.append({**saved_group["settings"], "params": [numbers[name] for name in named]})
    state = {numbers[name]: dict(value) for name, value in saved["state"].items()}
    optimizer.load_state_dict(
        {**saved["rest"], "state": {**saved["unnamed"], **state}, "param_groups": groups}
    )
    # load_state_dict moves tensors to their device but casts them to the parameter's dtype: restore the saved dtype.
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        for key, exact in saved["state"].get(names[id(p)], {}).items():
            loaded = optimizer.state[p].get(key)
            if isinstance(exact, Tensor) and isinstance(loaded, Tensor) and (exact.dim() or key == "step"):
                exact = exact.to(loaded.device)
            optimizer.state[p][key] = exact
