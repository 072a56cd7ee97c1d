"""`ElasticExchange`: how a replica starts, whatever it exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...lowrank.optimizers import Optimizers
from ...switching.switch import Switch
from .replicas import Replicas
from .shared_state import SharedState


class ElasticExchange(ABC):
    """Base class of `ElasticLocalSteps` and `ElasticGradients`."""

    _replicas: Replicas
    _state: SharedState | None = None
    #: What replicas exchange: all replicas of a job the same.
    _exchanged: str

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
        if self._state is None or optimizer is not None:
            self._state = SharedState(model, optimizer, switch, parts)
        self._state.model = model
        self._begin(self._state)

    @abstractmethod
    def _begin(self, state: SharedState) -> None:
        """Begin with this model and optimizers."""

    def _check_exchanged(self, state: Any) -> None:
        """Raise ValueError if the state of another replica is that of another kind of exchange."""
        if state["exchanged"] != self._exchanged:
            raise ValueError(
                f"it exchanges {state['exchanged']:.32}, this replica {self._exchanged}; use the same kind of exchange "
                "on all replicas of a job"
            )
