"""`SharedState`: model, optimizers and switch of a replica, sent to one that joins and restored there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...checkpoint.checkpoint_files import load_model_state, model_state
from ...checkpoint.expected_structure import expected_structure, known_plan
from ...checkpoint.sharded_tensors import is_sharded
from ...distributed.job import Job
from ...layers.names import own_name, unwrap
from ...lowrank.checks import check_plan
from ...lowrank.factorize import ranks_of
from ...lowrank.rewrite import Rewrite, nan_factors
from ...optim.by_name import check_optimizer, group_names, load_optimizer, names_by_id, optimizer_state
from ...optim.carry import Optimizers, as_list
from ...planning.plan import Plan
from ...switching.switch import Switch

#: Structure of an optimizer's state, of an engine's and of a `SharedState`, for `check_structure`.
OPTIMIZER = {
    "type": str,
    "groups": [{"params": [str], "settings": dict}],
    "state": {str: dict},
    "unnamed": dict,
    "rest": dict,
}
ENGINE = {
    "format": int,
    "steps": int,
    "size": int,
    "inside": int,
    "worker": int,
    "units": {str: (int, float)},
    "scale": (int, float),
    "methods": {str: {"shape": [int]}},
    "shared": {str: {str: Tensor}},
    "own": {str: {str: Tensor}},
}
SHARED = {
    "ranks": {str: {str: int}},
    "plan": (str, type(None)),
    "switch": (dict, type(None)),
    "model": {str: object},
    "optimizers": [OPTIMIZER],
    "parts": {str: object},
}


class SharedState:
    """State that a replica which joins needs from another one, except for the state of the exchange itself.

    Args:
        model: not sharded.
        optimizer: one, several or none.
        switch: restores the low-rank structure, and is restored itself.
        parts: other objects with `state_dict` and `load_state_dict`, such as a scheduler, by name.

    >>> model = nn.Linear(2, 2)
    >>> state = SharedState(model, optim.SGD(model.parameters(), lr=0.1))
    >>> state.load_state_dict(state.state_dict())
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        switch: Switch | None = None,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        if is_sharded(model):
            raise TypeError(
                "Replicas: the model is sharded by FSDP2; a replica is one process with a whole model"
            )
        for name, x in (parts or {}).items():
            if not (hasattr(x, "state_dict") and hasattr(x, "load_state_dict")):
                raise TypeError(f"{name} is a {type(x).__name__} without state_dict and load_state_dict")
        self.model = model
        self.optimizers: list[optim.Optimizer] = as_list(optimizer)
        self.switch = switch
        self.parts = dict(parts or {})

    @property
    def ranks(self) -> dict[str, dict[str, int]]:
        """Ranks of the low-rank layers."""
        return ranks_of(unwrap(self.model))

    def state_dict(self, without: Iterable[str] = ()) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings.

        Args:
            without: names of tensors of the model that are sent otherwise.
        """
        plan, names, left_out = known_plan(self.model, self.switch), names_by_id(self.model), set(without)
        return {
            "ranks": self.ranks,
            "plan": plan and plan.to_json(),
            "switch": self.switch and self.switch.state_dict(),
            "model": {n: x for n, x in model_state(unwrap(self.model)).items() if n not in left_out},
            "optimizers": [optimizer_state(optimizer, names) for optimizer in self.optimizers],
            "parts": {name: x.state_dict() for name, x in self.parts.items()},
        }

    def load_state_dict(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, own: bool = False
    ) -> None:
        """Restore the structure, then the values.

        Args:
            tensors: those of the model that are sent otherwise.
            own: keep the optimizers of this replica, and what the model has of the `tensors`.
        """
        self._restructure_(state)
        inner = unwrap(self.model)
        with torch.no_grad():
            load_model_state(
                inner, {**model_state(inner), **state["model"], **({} if own else tensors or {})}
            )
        for optimizer, saved in zip(self.optimizers, [] if own else state["optimizers"], strict=False):
            load_optimizer(optimizer, names_by_id(inner), saved)
        for name, x in self.parts.items():
            x.load_state_dict(state["parts"][name])

    def check(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if `load_state_dict` must not load the state and tensors of another replica. Changes nothing."""
        if len(state["optimizers"]) != len(self.optimizers):
            raise ValueError(
                f"this replica has {len(self.optimizers)} optimizers, another one {len(state['optimizers'])}; "
                "pass the same ones to start on all replicas"
            )
        for what, theirs, mine in (
            ("parts", set(state["parts"]), set(self.parts)),
            ("switch", state["switch"] is not None, self.switch is not None),
        ):
            if theirs != mine:
                raise ValueError(
                    f"only some replicas pass {what} {mine or theirs} to start; pass it on all replicas"
                )
        tensors, inner = {**state["model"], **tensors}, unwrap(self.model)
        buffers = {own_name(name) for name, _ in inner.named_buffers()}  # such as a mask of infinities
        for name, x in tensors.items():
            if name not in buffers and isinstance(x, Tensor) and not bool(x.isfinite().all()):
                raise ValueError(f"{name} is not finite")
        if self.ranks and self.ranks != state["ranks"]:
            return
        plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        model, optimizers = expected_structure(
            Path("the state"), state["ranks"], plan, inner, self.optimizers
        )
        expected, params = model_state(model), dict(model.named_parameters())
        for name in {*tensors, *map(own_name, params)}:
            if name not in tensors or name not in expected:
                raise ValueError(f"{name} is missing in {'the state' if name in expected else 'this model'}")
            shapes = [getattr(x, "shape", type(x)) for x in (tensors[name], expected[name])]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{name} is {shapes[0]} there, but {shapes[1]} in this model")
        names = names_by_id(model)
        for saved, own, like in zip(state["optimizers"], self.optimizers, optimizers, strict=True):
            check_optimizer(saved, type(own).__name__, group_names(like, names))

    def _restructure_(self, state: Mapping[str, Any]) -> None:
        """Give the model the low-rank layers of the other replica. Their factors are still to be loaded."""
        if self.ranks and self.ranks != state["ranks"]:
            change = Rewrite(unwrap(self.model), self.optimizers)
            change.merge()
            Job(self.model).commit([change], {})
        if self.switch is not None:
            self.switch.restore_(self.model, self.optimizers, state["switch"])
        elif self.ranks != state["ranks"]:
            plan = Plan.from_json(state["plan"])
            check_plan(unwrap(self.model), plan)
            change = Rewrite(unwrap(self.model), self.optimizers)
            change.factorize(plan, nan_factors)
            Job(self.model).commit([change], {})


def check_structure(x: Any, like: Any, where: str) -> None:
    """Raise ValueError unless nested state has the keys and types of `like`.

    Args:
        like: a type or several, a list with what each item is like, or a dict: by key, or with `str` for any keys.
        where: path to x, for the message.

    >>> check_structure({"a": [1, "b"]}, {"a": [int]}, "state")
    Traceback (most recent call last):
    ValueError: state/a/1 is a str, not an int
    """
    kind = type(like) if isinstance(like, dict | list) else like
    if not isinstance(x, kind):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(
            f"{where} is a {type(x).__name__}, not {'an' if kinds[0] in 'aeiou' else 'a'} {kinds}"
        )
    if isinstance(like, list):
        for i, item in enumerate(x):
            check_structure(item, like[0], f"{where}/{i}")
    elif isinstance(like, dict):
        for key in x if str in like else like:
            if key not in x:
                raise ValueError(f"{where} has no {key}")
            check_structure(key, str, f"a key of {where}")
            check_structure(x[key], like.get(str, like.get(key)), f"{where}/{key}")
