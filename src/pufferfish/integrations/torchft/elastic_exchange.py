"""`ElasticExchange`: how a replica starts, and the state that one which joins gets, whatever the replicas exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from ...compression import Settings
from ...layers import own_name, unwrap
from ...lowrank.by_name import check_optimizer, group_names, load_optimizer, names_by_id, optimizer_state
from ...lowrank.factorize import merge_, ranks_of
from ...lowrank.optimizers import Optimizers, as_list
from ...planning import Plan
from ...switching.switch import Switch
from .replicas import Replicas


class ElasticExchange(ABC):
    """Base class of `ElasticLocalSteps` and `ElasticGradients`."""

    _replicas: Replicas
    _settings: Settings
    #: What replicas exchange: all replicas of a job the same.
    _exchanged: str

    _started = False
    _model: nn.Module
    _optimizers: list[optim.Optimizer]
    _switch: Switch | None
    _parts: dict[str, Any]

    def start(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        switch: Switch | None = None,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin the job, or join it. Call it before the first update, and again, with the model, after parameters are replaced.

        Args:
            optimizer: every optimizer of the model. A replica that joins gets their state too.
            switch: brings the low-rank structure to a replica that joins after the switch.
            parts: other objects with `state_dict` and `load_state_dict`, such as a scheduler, by name.
        """
        if not self._started or optimizer is not None:
            check_is_stateful(parts or {})
            self._optimizers, self._switch, self._parts = as_list(optimizer), switch, dict(parts or {})
        self._model, self._started = model, True
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Begin with this model and these optimizers."""

    def _shared(self, without: Iterable[str] = ()) -> dict[str, Any]:
        """Return what a replica that joins needs, except for the state of the exchange itself.

        Args:
            without: names of tensors of the model that are sent otherwise.
        """
        plan, names, left_out = known_plan(self._model, self._switch), names_by_id(self._model), set(without)
        return {
            "ranks": self._ranks,
            "plan": plan and plan.to_json(),
            "switch": self._switch and self._switch.state_dict(),
            "model": {n: x for n, x in model_state(unwrap(self._model)).items() if n not in left_out},
            "optimizers": [optimizer_state(optimizer, names) for optimizer in self._optimizers],
            "parts": state_dicts(self._parts),
        }

    @property
    def _ranks(self) -> dict[str, dict[str, int]]:
        return ranks_of(unwrap(self._model))

    def _engine_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state of an `Engine` for the place of this replica now, without parts that belong to another one."""
        divided = {key for method in self._settings.by_pattern.values() for key in method.keys("divided")}
        own = {
            name: {key: x for key, x in tensors.items() if key not in divided}
            for name, tensors in state["own"].items()
        }
        transport = self._replicas.transport
        return {**state, "worker": transport.worker, "size": transport.size, "own": own}

    def _average_of_contributors_(self, means: Mapping[str, Tensor], contributors: int) -> None:
        """Make means over all replicas, of which some have sent zeros, those over the others. A vote stays a vote."""
        size = self._replicas.size
        if 0 < contributors < size:
            for name, method in self._settings.choose(list(means)).items():
                if method.kind != "vote":
                    means[name].mul_(size / contributors)

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if this replica must not adopt the state of another one. Changes nothing."""
        if state["exchanged"] != self._exchanged:
            raise ValueError(
                f"it exchanges {state['exchanged']:.32}, this replica {self._exchanged}; use the same kind of exchange "
                "on all replicas of a job"
            )
        tensors, state = self._tensors_beside(state), state["shared"]
        theirs = len(state["optimizers"]), sorted(state["parts"]), state["switch"] is not None
        if theirs != (len(self._optimizers), sorted(self._parts), self._switch is not None):
            raise ValueError("pass the same optimizers, parts= and switch= to start on all replicas")
        tensors, inner = {**state["model"], **tensors}, unwrap(self._model)
        _check_finite(tensors, state["optimizers"], inner)
        if self._ranks and self._ranks != state["ranks"]:
            return
        plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        model, optimizers = expected_structure(state["ranks"], plan, inner, self._optimizers)
        expected, params = model_state(model), dict(model.named_parameters())
        for name in {*tensors, *map(own_name, params)}:
            there, here = (getattr(x.get(name), "shape", None) for x in (tensors, expected))
            if there != here:
                raise ValueError(f"{name} is {there} there, but {here} in this model")
        names = names_by_id(model)
        for saved, own, like in zip(state["optimizers"], self._optimizers, optimizers, strict=True):
            check_optimizer(saved, type(own).__name__, group_names(like, names))

    def _tensors_beside(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of the model that a state has outside of "shared", after a check of what they are in."""
        return {}

    def _load_shared(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, own: bool = False
    ) -> None:
        """Restore the structure, then the values.

        Args:
            tensors: those of the model that are sent otherwise.
            own: keep the optimizers of this replica, and what the model has of the `tensors`.
        """
        if self._ranks and self._ranks != state["ranks"]:
            merge_(self._model, self._optimizers)
        if self._switch is not None:
            self._switch.restore_(self._model, self._optimizers, state["switch"])
        else:
            plan = None if state["plan"] is None else Plan.from_json(state["plan"])
            restructure_(self._model, state["ranks"], plan, self._optimizers)
        inner = unwrap(self._model)
        with torch.no_grad():
            load_model_state(
                inner, {**model_state(inner), **state["model"], **({} if own else tensors or {})}
            )
        for optimizer, saved in zip(self._optimizers, [] if own else state["optimizers"], strict=False):
            load_optimizer(optimizer, names_by_id(inner), saved)
        for name, x in self._parts.items():
            x.load_state_dict(state["parts"][name])


def _check_finite(
    tensors: Mapping[str, Tensor], optimizers: Iterable[Mapping[str, Any]], model: nn.Module
) -> None:
    buffers = {own_name(name) for name, _ in model.named_buffers()}  # such as a mask of infinities
    moments = {
        f"{key} of {name}": x
        for saved in optimizers
        for name, values in saved["state"].items()
        for key, x in values.items()
    }
    for name, x in {**tensors, **moments}.items():
        if name not in buffers and isinstance(x, Tensor) and not x.isfinite().all():
            raise ValueError(f"{name} is not finite")
