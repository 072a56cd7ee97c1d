"""`SharedState`: model, optimizers and switch of a replica, sent to one that joins and restored there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...checkpoint.checkpoint_files import load_model_state, model_state
from ...checkpoint.expected_structure import known_plan
from ...checkpoint.sharded_tensors import is_sharded
from ...distributed.job import Job
from ...layers.names import unwrap
from ...lowrank.checks import check_plan
from ...lowrank.factorize import ranks_of
from ...lowrank.rewrite import Rewrite, nan_factors
from ...optim.by_name import load_optimizer, names_by_id, optimizer_state
from ...optim.carry import Optimizers, as_list
from ...planning.plan import Plan
from ...switching.switch import Switch


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
        self._check(state)
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

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the other replica was started with other objects. Changes nothing."""
        if len(state["optimizers"]) != len(self.optimizers):
            raise ValueError(
                f"Replicas: this replica has {len(self.optimizers)} optimizers, another one {len(state['optimizers'])}; "
                "pass the same ones to start on all replicas"
            )
        for what, theirs, mine in (
            ("parts", set(state["parts"]), set(self.parts)),
            ("switch", state["switch"] is not None, self.switch is not None),
        ):
            if theirs != mine:
                raise ValueError(
                    f"Replicas: only some replicas pass {what} {mine or theirs} to start; pass it on all replicas"
                )

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
