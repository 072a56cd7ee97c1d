"""`Aggregator`: named gradients in, their mean over the workers out, by any method, with a memory where it needs one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import table
from .batch import Batch, batches
from .levels import Nodes, hand_over, nodes
from .meter import Meter
from .step import Step
from .store import MEMORY, Named, Store
from .table import Methods
from .transport import Group, Transport
from .turn import Turn

#: Bytes of gradients that go out together, where they go out while others are still computed.
PIECE = 25 * 2**20
#: Of a saved state.
_KEYS = {"steps", "size", "inside", "ranks", "units", "scale", "methods", "shared", "own"}
#: "flat", "node", or the groups inside a machine and between machines.
Levels = Literal["flat", "node"] | tuple[dist.ProcessGroup, dist.ProcessGroup]


class Aggregator:
    """Averages gradients over the workers of a group. The DDP hook is built on it.

    Messages are laid out by parameter name. What a method does not send stays in its memory (error feedback):
    fp32, each worker's own, added to the next gradient. When any worker's gradients are not finite, nothing of
    the step is kept anywhere and all results are NaN. A parameter whose gradient is zero on all workers is taken
    as unused: its result is zero and its memory waits.

    Args:
        method: a method, or a mapping name pattern → method, where the first match counts and what matches none
            travels as it is. Patterns are for parameter or module names.
        group: a process group (default: all processes, or this one alone) or `Simulated(n)`.
        memory: None for what suits the method; False goes without.
        scope: "layer", or "global": a sparsifier chooses among the elements of all tensors.
        exchange: for methods that know several: "all_to_all" (shards are summed by their owners, compressed again and
            sent to all) or "all_gather" (everything goes to everyone, compressed once). None: the method's own choice.
        levels: "node": workers of one machine (LOCAL_WORLD_SIZE, of consecutive ranks) average as they are, and one
            copy of each tensor travels between machines, compressed. Memories then belong to machines. Or two groups:
            (inside, between).
        seed: of the methods' random numbers. The global generators are never touched.
        smallest: 1-D tensors, and those of fewer elements, travel as they are (save in 16-bit averages).
            0 compresses all that the method can.
        nonfinite: "nan", or "zero" for loops that do not look.
        overlap: whether pieces of 25 MiB go out while the backward pass goes on; for the hook. None: where it costs
            nothing, that is for plain and 16-bit averages.

    >>> from pufferfish.compress import Simulated, TopK
    >>> two = Aggregator(TopK(k=1), Simulated(2), smallest=0)
    >>> two.together([{"w": torch.tensor([4.0, 1.0])}, {"w": torch.tensor([0.0, 2.0])}])[0]
    {'w': tensor([2., 1.])}
    >>> two.meter.messages, two.meter.handed["all_gather"]
    (2, 8)
    """

    def __init__(
        self,
        method: Methods,
        group: dist.ProcessGroup | Transport | None = None,
        *,
        memory: bool | None = None,
        scope: Literal["layer", "global"] = "layer",
        exchange: str | None = None,
        levels: Levels = "flat",
        seed: int = 0,
        smallest: int = 1024,
        nonfinite: Literal["nan", "zero"] = "nan",
        overlap: bool | None = None,
    ) -> None:
        table.check(method, memory, scope, exchange)
        if nonfinite not in ("nan", "zero"):
            raise ValueError(f'nonfinite={nonfinite!r} is neither "nan" nor "zero"')
        for name, value in (("seed", seed), ("smallest", smallest)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} is not a whole number ≥ 0")
        if overlap not in (None, True, False):
            raise ValueError(f"overlap={overlap!r} is none of None, True, False")
        if overlap and (scope == "global" or levels != "flat"):
            raise ValueError(
                'overlap=True: scope="global" and levels="node" need all gradients at once; leave overlap=None'
            )
        self.method, self.memory, self.exchange, self.overlap = method, memory, exchange, overlap
        self.scope, self.seed, self.smallest, self.nonfinite = scope, seed, smallest, nonfinite
        self.nodes = _nodes(levels, group)
        if self.nodes is not None:
            self.transport: Transport = self.nodes.between
        else:
            self.transport = group if isinstance(group, Transport) else Group(group)
        self.steps = 0  # calls, finite or not: the random streams go on with them
        self._stores = [Store(rank, self.transport.size) for rank in self.transport.ranks]
        self._units: dict[str, float] = {}
        self._scale = 1.0
        self._seen: list[Any] = []
        self._parts: list[list[Batch]] = []
        self._resumed: dict[str, Any] | None = None  # what was loaded, until the next step

    @property
    def meter(self) -> Meter:
        """What was sent so far."""
        return self.transport.meter

    def use(self, method: Methods, memory: bool | None = None) -> None:
        """Another method from the next call on; call it on all workers alike.

        What the old one has not sent stays in the new one's memory, or is sent with the next gradient where it has
        none. Whatever else the old one kept is dropped.
        """
        table.check(method, memory, self.scope, self.exchange)
        self.method, self.memory, self._seen = method, memory, []

    def __call__(
        self, gradients: Mapping[str, Tensor], units: Mapping[str, float] | None = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        """The mean over the workers, by name, in the gradients' shapes and dtypes.

        Call it on all workers alike, each time with all parameters: what is kept of a missing one is forgotten.

        `units`: by name, how many of its units a gradient counts for one of the update's; a memory is scaled
        when they change. For loss scale S and learning rate γ that is S/γ; 0 where it is not known. `scale`: S, which
        alone counts for a momentum.

        >>> from pufferfish.compress import BFloat16
        >>> Aggregator(BFloat16())({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
        """
        return self.together([gradients], units, scale)[0]

    def together(
        self,
        gradients: Sequence[Mapping[str, Tensor]],
        units: Mapping[str, float] | None = None,
        scale: float = 1.0,
    ) -> list[dict[str, Tensor]]:
        """The same for all the workers of this process: one mapping, and one answer, for each."""
        if len(gradients) != len(self._stores):
            raise ValueError(
                f"{len(gradients)} workers' gradients were given, but {len(self._stores)} live here"
            )
        means = [{name: torch.empty_like(g) for name, g in mine.items()} for mine in gradients]
        if any(g.numel() for g in gradients[0].values()):
            self._arrange(gradients[0], None)
            step = self.begin(None, units, scale)
            step.add(gradients)
            step.finish(means)
        return means

    def begin(
        self,
        like: Mapping[str, Tensor] | None = None,
        units: Mapping[str, float] | None = None,
        scale: float = 1.0,
    ) -> Step:
        """A step whose gradients come bit by bit: `add` them, then `finish`.

        `like`: tensors of the shapes, dtypes and device of all gradients, on all workers in the same order, in which
        the parameters are used; None: all as in the step before.
        """
        if like is not None:
            self._arrange(like, self.overlap_bytes)
        assert self._parts, "a first step, or one after `use`, has to be told what its gradients are like"
        own = [part for i, part in enumerate(self._parts) if self.nodes is None or i == self.nodes.rank]
        for store in self._stores:
            store.arrange([batch for part in own for batch in part], self._device)
        self._rescale(units or {}, scale)
        instead = float("nan") if self.nonfinite == "nan" else 0.0
        return Step(
            self._parts, self.transport, self._stores, self._turn, self.nodes, instead, self._device, self._ended,
        )  # fmt: skip

    def _ended(self) -> None:
        self.steps += 1
        self._resumed = None

    @property
    def remembers(self) -> bool:
        """Whether anything is kept in the gradients' units, or will be: else nobody needs to know them."""
        kept = [
            method.in_units
            or method.in_scale
            or (self.memory is not False and table.has_memory(method, None))
            for method in table.by_pattern(self.method).values()
        ]
        return any(kept) or any(store.remembers for store in self._stores)

    def _arrange(self, like: Mapping[str, Tensor], nbytes: int | None) -> None:
        """What goes together: pieces in the order given, whatever is in one in the order of names."""
        seen = [nbytes, *((name, g.shape, g.dtype, g.device) for name, g in like.items())]
        if seen == self._seen:
            return
        device = next(iter(like.values())).device
        for name, g in like.items():
            if not g.is_floating_point() or g.device != device:
                raise ValueError(
                    f"{name}: a {g.dtype} gradient on {g.device}; all must be floats on {device}"
                )
        if not self._seen and self._resumed is None:  # a switch may have come between
            table.refuse_unmatched(self.method, like)
        before = self._parts
        self._parts = [
            batches(self.method, {name: like[name] for name in names}, self.memory, self.scope, self.smallest)
            for names in (self.nodes.owners(like) if self.nodes else pieces(like, nbytes))
        ]
        self._device, self._seen = device, seen
        if self.nodes and before:
            hand_over(self.nodes, self._stores[0], before, self._parts, device)
        if self._resumed is not None:
            self._tell_of_others(self._resumed["methods"])

    def _tell_of_others(self, saved: Mapping[str, str]) -> None:
        """A state that was saved with another method is a mistake of whoever starts the job again."""
        for batch in (batch for part in self._parts for batch in part):
            for name in batch.names:
                before = saved.get(name, "").rpartition(" (")[0]  # what follows is the shape
                if before and before != repr(batch.method):
                    warnings.warn(
                        f"compression: {name} was saved with {before} and goes on with {batch.method!r}; to go on as "
                        "before, give that method, or call use() with it after loading",
                        stacklevel=5,
                    )
                    return

    @property
    def overlap_bytes(self) -> int | None:
        """How large pieces are that go out before the others; None: all goes out at once."""
        if self.overlap is None:
            cheap = all(method.elementwise for method in table.by_pattern(self.method).values())
            return PIECE if cheap and self.scope == "layer" and self.nodes is None else None
        return PIECE if self.overlap else None

    def _rescale(self, units: Mapping[str, float], scale: float) -> None:
        if (units and units != self._units) or scale != self._scale:
            factors = {
                name: u / self._units[name] for name, u in units.items() if u and self._units.get(name)
            }
            for store in self._stores:
                store.rescale(factors, scale / self._scale)
            self._units, self._scale = dict(units) or self._units, scale

    def _turn(self, rank: int, store: Store, batch: Batch) -> Turn:
        return Turn(
            rank=rank,
            size=self.transport.size,
            step=self.steps,
            names=batch.names,
            dtype=batch.dtype,
            device=self._device,
            seed=self.seed,
            exchange=self.exchange,
            memory=batch.memory,
            units=tuple(self._units.get(name, 0.0) for name in batch.names),
            state={key: x for key, x in store.kept[batch].items() if key != MEMORY},
            scratch=store.scratch[batch],
        )

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by parameter name. Each worker has a memory of its own: save it on all of them."""
        if self._resumed is not None:
            return self._resumed | {"steps": self.steps}
        shared: Named = {}
        own: list[Named] = []
        for store in self._stores:
            keys = {name: batch.method.shared_state for batch in store.kept for name in batch.names}
            own.append({})
            for name, state in store.named().items():
                for key, x in state.items():
                    place = shared if key in keys[name] else own[-1]
                    place.setdefault(name, {})[key] = x.clone()
        return {
            "steps": self.steps,
            **self._place(),
            "units": dict(self._units),
            "scale": self._scale,
            "methods": self._stores[0].methods(),
            "shared": shared,
            "own": own,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. What another number of workers, or another worker, kept for itself is dropped, with a warning."""
        missing = _KEYS - state.keys()
        if missing:
            raise ValueError(f"this is no compressor's state: it lacks {', '.join(sorted(missing))}")
        here = self._place()
        same = all(state[key] == here[key] for key in ("size", "inside"))
        saved = dict(zip(state["ranks"], state["own"], strict=True)) if same else {}
        own: list[Named] = [saved.get(rank, {}) for rank in here["ranks"]]
        lost = [rank for rank in here["ranks"] if rank not in saved]
        if lost and any(state["own"]):
            warnings.warn(
                f"compression: rank {', '.join(map(str, lost))} of {_workers(here)} starts with empty memories; "
                f"those saved are of rank {', '.join(map(str, state['ranks']))} of {_workers(state)}",
                stacklevel=2,
            )
        # of a machine's workers each has only what it owned
        shared = state["shared"] if same or state["inside"] == 1 else {}
        loaded = [_copied(shared, mine) for mine in own]
        self.steps, self._units, self._scale = state["steps"], dict(state["units"]), state["scale"]
        for store, named in zip(self._stores, loaded, strict=True):
            store.load(named, dict(state["methods"]))
        self._resumed = {**state, **here, "shared": shared, "own": own}

    def _place(self) -> dict[str, Any]:
        """How many workers there are, in all and inside a machine, and which of them live here."""
        inside, rank = (self.nodes.size, self.nodes.rank) if self.nodes else (1, 0)
        return {
            "size": self.transport.size * inside,
            "inside": inside,
            "ranks": [r * inside + rank for r in self.transport.ranks],
        }


def pieces(like: Mapping[str, Tensor], nbytes: int | None) -> list[list[str]]:
    """Names of what goes out together. Those used last have their gradients first, so they come first.

    >>> pieces({"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(2)}, 16)
    [['c', 'b'], ['a']]
    """
    found: list[list[str]] = [[]]
    size = 0
    for name in reversed(list(like)):
        if nbytes is not None and size >= nbytes:
            found.append([])
            size = 0
        found[-1].append(name)
        size += like[name].nbytes
    return found


def _nodes(levels: Levels, group: dist.ProcessGroup | Transport | None) -> Nodes | None:
    if levels == "flat":
        return None
    if isinstance(group, Transport):
        raise ValueError(f"levels={levels!r} is for process groups; {type(group).__name__} has one level")
    if levels == "node":
        return nodes(group)
    if isinstance(levels, tuple) and len(levels) == 2:
        return Nodes(*levels)
    raise ValueError(f'levels={levels!r} is neither "flat" nor "node" nor two groups: (inside, between)')


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
