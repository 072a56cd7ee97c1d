"""`SharedState`: model, optimizers and switch of a replica, sent to one that joins and restored there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...checkpoint.checkpoint import (
    check_is_stateful,
    expected_structure,
    known_plan,
    restructure_,
    state_dicts,
)
from ...checkpoint.files import load_model_state, model_state
from ...layers.names import own_name, unwrap
from ...local.local_steps import all_finite
from ...lowrank.by_name import check_optimizer, group_names, load_optimizer, names_by_id, optimizer_state
from ...lowrank.optimizers import Optimizers, as_list
from ...lowrank.rewrite import merge_, ranks_of
from ...planning.plan import Plan
from ...switching.switch import Switch


class SharedState:
    """State that a replica which joins needs from another one, except for the state of the exchange itself.

    Args:
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
        check_is_stateful(parts or {})
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
            "parts": state_dicts(self.parts),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, own: bool = False
    ) -> None:
        """Restore the structure, then the values.

        Args:
            tensors: those of the model that are sent otherwise.
            own: keep the optimizers of this replica, and what the model has of the `tensors`.
        """
        if self.ranks and self.ranks != state["ranks"]:
            merge_(self.model, self.optimizers)
        if self.switch is not None:
            self.switch.restore_(self.model, self.optimizers, state["switch"])
        else:
            plan = None if state["plan"] is None else Plan.from_json(state["plan"])
            restructure_(self.model, state["ranks"], plan, self.optimizers)
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
        theirs = len(state["optimizers"]), sorted(state["parts"]), state["switch"] is not None
        if theirs != (len(self.optimizers), sorted(self.parts), self.switch is not None):
            raise ValueError("pass the same optimizers, parts= and switch= to start on all replicas")
        tensors, inner = {**state["model"], **tensors}, unwrap(self.model)
        buffers = {own_name(name) for name, _ in inner.named_buffers()}  # such as a mask of infinities
        moments = {
            f"{key} of {name}": x
            for saved in state["optimizers"]
            for name, values in saved["state"].items()
            for key, x in values.items()
        }
        for name, x in {**tensors, **moments}.items():
            if name not in buffers and isinstance(x, Tensor) and not all_finite([x]):
                raise ValueError(f"{name} is not finite")
        if self.ranks and self.ranks != state["ranks"]:
            return
        plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        model, optimizers = expected_structure(state["ranks"], plan, inner, self.optimizers)
        expected, params = model_state(model), dict(model.named_parameters())
        for name in {*tensors, *map(own_name, params)}:
            there, here = (getattr(x.get(name), "shape", None) for x in (tensors, expected))
            if there != here:
                raise ValueError(f"{name} is {there} there, but {here} in this model")
        names = names_by_id(model)
        for saved, own, like in zip(state["optimizers"], self.optimizers, optimizers, strict=True):
            check_optimizer(saved, type(own).__name__, group_names(like, names))
