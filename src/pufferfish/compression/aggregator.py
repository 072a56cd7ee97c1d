"""`Aggregator`: named gradients in, their mean over the workers out, by any method, with a memory where it needs one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import settings as table
from .batch import Batch, batches, pieces
from .hierarchy import Levels as Levels
from .hierarchy import chosen, hand_over
from .kept import Kept
from .meter import Meter
from .settings import Methods
from .step import Step
from .store import MEMORY, Store
from .transport import Group, Transport
from .turn import Turn

#: Bytes of gradients that go out together, where they go out while others are still computed; at first fewer.
PIECE = 25 * 2**20


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
        overlap: whether pieces of 25 MiB, the first of 1, go out while the backward pass goes on; for the hook. None:
            where it costs nothing, that is for plain and 16-bit averages.

    >>> from pufferfish.compression import Simulated, TopK
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
        table.check_numbers(seed=seed, smallest=smallest)
        table.check_words(nonfinite, overlap, at_once=scope == "global" or levels != "flat")
        self.method, self.memory, self.exchange, self.overlap = method, memory, exchange, overlap
        self.scope, self.seed, self.smallest, self.nonfinite = scope, seed, smallest, nonfinite
        self.nodes = chosen(levels, group)
        if self.nodes is not None:
            self.transport: Transport = self.nodes.between
        else:
            self.transport = group if isinstance(group, Transport) else Group(group)
        self.kept = Kept(self.transport, self.nodes)
        self._seen: list[Any] = []
        self._parts: list[list[Batch]] = []

    @property
    def steps(self) -> int:
        """How many there were, finite or not."""
        return self.kept.steps

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

        >>> from pufferfish.compression import BFloat16
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
        if len(gradients) != len(self.kept.stores):
            raise ValueError(
                f"{len(gradients)} workers' gradients were given, but {len(self.kept.stores)} live here"
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
        self.kept.arrange([batch for part in own for batch in part], self._device)
        self.kept.rescale(units or {}, scale)
        instead = float("nan") if self.nonfinite == "nan" else 0.0
        return Step(
            self._parts, self.transport, self.kept.stores, self._turn, self.nodes, instead, self._device,
            self.kept.ended,
        )  # fmt: skip

    @property
    def remembers(self) -> bool:
        """Whether anything is kept in the gradients' units, or will be: else nobody needs to know them."""
        kept = [
            method.in_units
            or method.in_scale
            or (self.memory is not False and table.has_memory(method, None))
            for method in table.by_pattern(self.method).values()
        ]
        return any(kept) or any(store.remembers for store in self.kept.stores)

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
        if not self._seen and self.kept.resumed is None:  # a switch may have come between
            table.refuse_unmatched(self.method, like)
        parts = [
            batches(self.method, {name: like[name] for name in names}, self.memory, self.scope, self.smallest)
            for names in (self.nodes.owners(like) if self.nodes else pieces(like, nbytes))
        ]
        self.kept.check_resumed([batch for part in parts for batch in part])
        before, self._parts, self._device, self._seen = self._parts, parts, device, seen
        if self.nodes and before:
            hand_over(self.nodes, self.kept.stores[0], before, parts, device)

    @property
    def overlap_bytes(self) -> int | None:
        """How large pieces are that go out before the others; None: all goes out at once."""
        if self.overlap is None:
            cheap = all(method.elementwise for method in table.by_pattern(self.method).values())
            return PIECE if cheap and self.scope == "layer" and self.nodes is None else None
        return PIECE if self.overlap else None

    def _turn(self, rank: int, store: Store, batch: Batch) -> Turn:
        return Turn(
            rank=rank,
            size=self.transport.size,
            step=self.kept.steps,
            names=batch.names,
            dtype=batch.dtype,
            device=self._device,
            seed=self.seed,
            exchange=self.exchange,
            memory=batch.memory,
            units=tuple(self.kept.units.get(name, 0.0) for name in batch.names),
            state={key: x for key, x in store.kept[batch].items() if key != MEMORY},
            scratch=store.scratch[batch],
        )

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by parameter name. Each worker has a memory of its own: save it on all of them."""
        return self.kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. What another number of workers, or another worker, kept for itself is dropped, with a warning."""
        shapes = {name: shape for name, shape, _, _ in self._seen[1:]}
        self.kept.load_state_dict(state, shapes)
