"""`Kept`: what an aggregator keeps from step to step, for the workers that live here, and how it is saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .hierarchy import Nodes
from .store import Named, Store
from .transport import Transport

#: Of a saved state.
_KEYS = {"steps", "size", "inside", "ranks", "units", "scale", "methods", "shared", "own"}


class Kept:
    """A store for each worker here, the units that it is in, and how many steps there were.

    >>> from pufferfish.compression import Simulated
    >>> Kept(Simulated(2), None).state_dict()["ranks"]
    [0, 1]
    """

    def __init__(self, transport: Transport, nodes: Nodes | None) -> None:
        self.transport, self.nodes = transport, nodes
        self.stores = [Store(rank, transport.size) for rank in transport.ranks]
        self.steps = 0  # finite or not: the random streams go on with them
        self.units: dict[str, float] = {}
        self.resumed: dict[str, Any] | None = None  # what was loaded, until the next step
        self._scale = 1.0

    def arrange(self, batches: Sequence[Batch], device: torch.device) -> None:
        """Bring all of it into these batches."""
        for store in self.stores:
            store.arrange(batches, device)

    def rescale(self, units: Mapping[str, float], scale: float) -> None:
        """From now on gradients are in these units, by parameter name, and of this loss scale."""
        if (units and units != self.units) or scale != self._scale:
            factors = {name: u / self.units[name] for name, u in units.items() if u and self.units.get(name)}
            for store in self.stores:
                store.rescale(factors, scale / self._scale)
            self.units, self._scale = dict(units) or self.units, scale

    def ended(self) -> None:
        """A step is over."""
        self.steps += 1
        self.resumed = None

    def check_resumed(self, batches: Sequence[Batch]) -> None:
        """Whether what was loaded, if anything, is for these batches."""
        if self.resumed is not None:
            shapes = {
                n: shape for batch in batches for n, shape in zip(batch.names, batch.shapes, strict=True)
            }
            _refuse_another_model(self.resumed, shapes)
            _tell_of_others(self.resumed["methods"], batches)

    def state_dict(self) -> dict[str, Any]:
        """See `Aggregator`."""
        if self.resumed is not None:
            return self.resumed | {"steps": self.steps}
        shared: Named = {}
        own: list[Named] = []
        for store in self.stores:
            keys = {name: batch.method.shared_state for batch in store.kept for name in batch.names}
            own.append({})
            for name, state in store.named().items():
                for key, x in state.items():
                    place = shared if key in keys[name] else own[-1]
                    place.setdefault(name, {})[key] = x.clone()
        return {
            "steps": self.steps,
            **self._place(),
            "units": dict(self.units),
            "scale": self._scale,
            "methods": self.stores[0].methods(),
            "shared": shared,
            "own": own,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """See `Aggregator`. `shapes`: of the parameters, by name, where they are known already."""
        missing = _KEYS - state.keys()
        if missing:
            raise ValueError(f"this is no compressor's state: it lacks {', '.join(sorted(missing))}")
        if shapes:
            _refuse_another_model(state, shapes)
        here = self._place()
        same = all(state[key] == here[key] for key in ("size", "inside"))
        saved = dict(zip(state["ranks"], state["own"], strict=True)) if same else {}
        own: list[Named] = [saved.get(rank, {}) for rank in here["ranks"]]
        lost = [rank for rank in here["ranks"] if rank not in saved]
        if lost and any(state["own"]):
            warnings.warn(
                f"compression: rank {', '.join(map(str, lost))} of {_workers(here)} starts with empty memories; "
                f"those saved are of rank {', '.join(map(str, state['ranks']))} of {_workers(state)}",
                stacklevel=3,
            )
        # of a machine's workers each has only what it owned
        shared = state["shared"] if same or state["inside"] == 1 else {}
        loaded = [_copied(shared, mine) for mine in own]
        self.steps, self.units, self._scale = state["steps"], dict(state["units"]), state["scale"]
        for store, named in zip(self.stores, loaded, strict=True):
            store.load(named, dict(state["methods"]))
        self.resumed = {**state, **here, "shared": shared, "own": own}

    def _place(self) -> dict[str, Any]:
        """How many workers there are, in all and inside a machine, and which of them live here."""
        inside, rank = (self.nodes.size, self.nodes.rank) if self.nodes else (1, 0)
        return {
            "size": self.transport.size * inside,
            "inside": inside,
            "ranks": [r * inside + rank for r in self.transport.ranks],
        }


def _refuse_another_model(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """A state that nothing here can go on with is a mistake. After a switch, some parameters are still as they were."""
    saved = {name: _method_and_shape(text)[1] for name, text in state["methods"].items()}
    here = {name: str(tuple(shape)) for name, shape in shapes.items()}
    if (state["shared"] or any(state["own"])) and not saved.items() & here.items():
        raise ValueError(
            f"this compressor's state is of another model, with {_few(saved)}; here are {_few(here)}; "
            "load the state that was saved with this model"
        )


def _tell_of_others(saved: Mapping[str, str], batches: Sequence[Batch]) -> None:
    """A state that was saved with another method is a mistake of whoever starts the job again."""
    for batch in batches:
        for name in batch.names:
            before = _method_and_shape(saved.get(name, ""))[0]
            if before and before != repr(batch.method):
                warnings.warn(
                    f"compression: {name} was saved with {before} and goes on with {batch.method!r}; to go on as "
                    "before, give that method, or call use() with it after loading",
                    stacklevel=6,
                )
                return


def _method_and_shape(text: str) -> tuple[str, str]:
    """Of what `Store.methods` says of a parameter.

    >>> _method_and_shape("PowerSGD(rank=2) (24, 36)")
    ('PowerSGD(rank=2)', '(24, 36)')
    """
    method, _, shape = text.rpartition(" (")
    return method, f"({shape}"


def _few(shapes: Mapping[str, str]) -> str:
    names = [f"{name} {shape}" for name, shape in shapes.items()]
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _workers(place: Mapping[str, Any]) -> str:
    inside = f", {place['inside']} a machine" if place["inside"] > 1 else ""
    return f"{place['size']}{inside}"


def _copied(*parts: Mapping[str, Mapping[str, Tensor]]) -> Named:
    """All parts in one, in memory of their own."""
    found: Named = {}
    for part in parts:
        for name, state in part.items():
            found.setdefault(name, {}).update({key: x.clone() for key, x in state.items()})
    return found
