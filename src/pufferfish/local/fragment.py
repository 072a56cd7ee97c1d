"""`Fragment`: a part of the model that local steps average at a moment of its own."""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..compression import Engine, Method, NoCompression, Settings
from ..compression.exchange import Transport
from ..compression.settings import matches
from .flight import Flight


class Fragment:
    """Names of the tensors in a fragment, the engine that averages them, and the average on its way.

    Args:
        names: names of its parameters and buffers.
        settings: settings of the whole model.
        uncompressed: names that are sent uncompressed, whatever the settings say.
    """

    def __init__(
        self, names: Sequence[str], settings: Settings, uncompressed: Collection[str], transport: Transport
    ) -> None:
        self.names = list(names)
        self.engine = Engine(settings_for(names, settings, uncompressed), transport)
        self.since = 0  # number of updates since it was sent
        self.sent_bytes = 0.0  # on the wire, in its last average
        self.flight: Flight | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings. Waits for the flight, which changes error feedback."""
        flight = self.flight and self.flight.state_dict()
        return {
            "names": list(self.names),
            "since": self.since,
            "sent_bytes": self.sent_bytes,
            "engine": self.engine.state_dict(),
            "flight": flight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.engine.load_state_dict(state["engine"])
        self.since = state["since"]
        self.sent_bytes = state["sent_bytes"]
        self.flight = state["flight"] and Flight(**state["flight"])


def move_engine_states(
    states: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return the state of an engine for tensors that were in other fragments before.

    Args:
        states: states of the engines so far.
        shapes: shapes of the new engine's tensors. State of a tensor that had another shape is dropped.
    """
    methods = {name: key for state in states for name, key in state["methods"].items()}
    names = {name for name in methods.keys() & shapes.keys() if methods[name]["shape"] == [*shapes[name]]}
    parts = {
        part: {name: x for state in states for name, x in state[part].items() if name in names}
        for part in ("units", "methods", "shared", "own")
    }
    return {**states[0], **parts, "steps": max(state["steps"] for state in states)}


def settings_for(names: Sequence[str], settings: Settings, uncompressed: Collection[str]) -> Settings:
    """Return the settings with only those patterns that choose the method of a tensor among `names`."""
    patterns = settings.by_pattern
    chosen = {next((p for p in patterns if matches(n, p)), None) for n in names if n not in uncompressed}
    mine: dict[str, Method] = {glob.escape(name): NoCompression() for name in names if name in uncompressed}
    mine |= {pattern: method for pattern, method in patterns.items() if pattern in chosen}
    return Settings(mine or NoCompression())
