"""Optimizer state by the names of the parameters, whatever order or numbers an optimizer gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn, optim

from ..layers.names import own_name, unwrap


def names_of(model: nn.Module) -> dict[int, str]:
    """id(parameter) → its own name."""
    return {id(p): own_name(name) for name, p in unwrap(model).named_parameters()}


def group_names(optimizer: optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of every group's parameters."""
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                shape = "×".join(map(str, p.shape)) or "single"
                raise ValueError(
                    f"{type(optimizer).__name__}, group {i}: it holds a {shape} parameter that the model does not "
                    "have; put everything that is trained into one module, and make the optimizer from that"
                )
        groups.append([names[id(p)] for p in group["params"]])
    return groups


def optimizer_state(optimizer: optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """What `optimizer.state_dict()` says, with names for numbers."""
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
    """Whether `saved` belongs to an optimizer of this kind with these names in its groups."""
    if saved["type"] != kind:
        raise ValueError(f"the saved optimizer is {saved['type']}, this one is {kind}")
    if len(saved["groups"]) != len(groups):
        raise ValueError(f"the saved {kind} has {len(saved['groups'])} groups, this one has {len(groups)}")
    for i, (there, here) in enumerate(zip(saved["groups"], groups, strict=True)):
        for name in sorted(set(there["params"]) ^ set(here)):
            where = "the saved one only" if name in there["params"] else "this one only"
            raise ValueError(f"{kind}, group {i}: {name} is in {where}; make the groups as they were")


def load_optimizer(optimizer: optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Put what `optimizer_state` returned into the optimizer, bit for bit."""
    numbers: dict[str, int] = {}
    groups = []
    for here, there in zip(group_names(optimizer, names), saved["groups"], strict=True):
        numbers |= {name: len(numbers) + i for i, name in enumerate(here)}
        groups.append({**there["settings"], "params": [numbers[name] for name in here]})
    state = {numbers[name]: dict(value) for name, value in saved["state"].items()}
    optimizer.load_state_dict(
        {**saved["rest"], "state": {**saved["unnamed"], **state}, "param_groups": groups}
    )
    # That put every tensor on its device, but cast it to its parameter's dtype: now the exact ones.
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        for key, exact in saved["state"].get(names[id(p)], {}).items():
            loaded = optimizer.state[p].get(key)
            if isinstance(exact, Tensor) and isinstance(loaded, Tensor) and (exact.dim() or key == "step"):
                exact = exact.to(loaded.device)
            optimizer.state[p][key] = exact
