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
from .lockstep import lockstep
from .meter import Meter
from .method import Steps, Sum
from .store import MEMORY, Named, Store
from .table import Methods
from .transport import Group, Transport
from .turn import Turn

#: Larger gradients count as infinite: sums of their squares would be.
_LIMIT = 1e15


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
        seed: of the methods' random numbers. The global generators are never touched.
        smallest: 1-D tensors, and those of fewer elements, travel as they are (save in 16-bit averages).
            0 compresses all that the method can.
        nonfinite: "nan", or "zero" for loops that do not look.

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
        seed: int = 0,
        smallest: int = 1024,
        nonfinite: Literal["nan", "zero"] = "nan",
    ) -> None:
        table.check(method, memory, scope)
        if nonfinite not in ("nan", "zero"):
            raise ValueError(f'nonfinite={nonfinite!r} is neither "nan" nor "zero"')
        self.method, self.memory = method, memory
        self.scope, self.seed, self.smallest, self.nonfinite = scope, seed, smallest, nonfinite
        self.transport = group if isinstance(group, Transport) else Group(group)
        self.steps = 0  # calls, finite or not: the random streams go on with them
        self._stores = [Store() for _ in self.transport.ranks]
        self._units: dict[str, float] = {}
        self._seen: list[Any] = []
        self._batches: list[Batch] = []
        self._resumed: dict[str, Any] | None = None  # what was loaded, until the next step

    @property
    def meter(self) -> Meter:
        """What was sent so far."""
        return self.transport.meter

    def use(self, method: Methods, memory: bool | None = None) -> None:
        """Another method from the next call on; call it on all workers alike.

        Where the new one has a memory too, it goes on with the old one's; else that is sent with the next gradient.
        Whatever else the old one kept is dropped.
        """
        table.check(method, memory, self.scope)
        self.method, self.memory, self._seen, self._batches = method, memory, [], []

    def __call__(
        self, gradients: Mapping[str, Tensor], units: Mapping[str, float] | None = None
    ) -> dict[str, Tensor]:
        """The mean over the workers, by name, in the gradients' shapes and dtypes.

        Call it on all workers alike, each time with all parameters: what is kept of a missing one is forgotten.

        `units`: by name, how many of its units a gradient counts for one of the update's; a memory is scaled
        when they change. For loss scale S and learning rate γ that is S/γ; 0 where it is not known.

        >>> from pufferfish.compress import BFloat16
        >>> Aggregator(BFloat16())({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
        """
        return self.together([gradients], units)[0]

    @torch.no_grad()
    def together(
        self, gradients: Sequence[Mapping[str, Tensor]], units: Mapping[str, float] | None = None
    ) -> list[dict[str, Tensor]]:
        """The same for all the workers of this process: one mapping, and one answer, for each."""
        if len(gradients) != len(self._stores):
            raise ValueError(
                f"{len(gradients)} workers' gradients were given, but {len(self._stores)} live here"
            )
        first = gradients[0]
        if not any(g.numel() for g in first.values()):
            return [{name: g.clone() for name, g in mine.items()} for mine in gradients]
        device = next(iter(first.values())).device
        self._arrange(first, device)
        self._rescale(units or {})
        with (
            self.meter.step(device, sum(g.nbytes for g in first.values())),
            torch.autocast(device.type, enabled=False),
        ):
            turns = [
                self._turns(*worker, device)
                for worker in zip(self.transport.ranks, self._stores, strict=True)
            ]
            tasks = [self._tasks(*worker) for worker in zip(gradients, turns, self._stores, strict=True)]
            ended = lockstep(tasks, self.transport)
            means = [self._settled(*worker) for worker in zip(ended, turns, self._stores, strict=True)]
        self.steps += 1
        self._resumed = None
        return [{name: mean.get(name, g) for name, g in first.items()} for mean in means]  # g: empty ones

    def _arrange(self, gradients: Mapping[str, Tensor], device: torch.device) -> None:
        """Batches in the order of names: nothing else decides where a number stands in a message."""
        seen = [(name, g.shape, g.dtype, g.device) for name, g in sorted(gradients.items())]
        if seen != self._seen:
            for name, _, dtype, place in seen:
                if not dtype.is_floating_point or place != device:
                    raise ValueError(f"{name}: a {dtype} gradient on {place}; all must be floats on {device}")
            if not self._batches:
                table.refuse_unmatched(self.method, gradients)
            self._batches = batches(self.method, gradients, self.memory, self.scope, self.smallest)
            self._seen = seen
        for store in self._stores:
            store.arrange(self._batches, device)

    def _rescale(self, units: Mapping[str, float]) -> None:
        factors = {name: u / self._units[name] for name, u in units.items() if u and self._units.get(name)}
        for store in self._stores:
            store.rescale(factors)
        self._units = dict(units) or self._units

    def _turns(self, rank: int, store: Store, device: torch.device) -> list[Turn]:
        return [
            Turn(
                rank=rank,
                size=self.transport.size,
                step=self.steps,
                names=batch.names,
                dtype=batch.dtype,
                device=device,
                seed=self.seed,
                state={key: x for key, x in store.kept[batch].items() if key != MEMORY},
            )
            for batch in self._batches
        ]

    def _tasks(self, gradients: Mapping[str, Tensor], turns: list[Turn], store: Store) -> list[Steps]:
        """What one worker does in this step: find out how all are, and the methods' work on finite numbers."""
        sizes = torch._foreach_norm([gradients[name] for turn in turns for name in turn.names], float("inf"))
        largest = torch.stack([size.float() for size in sizes])
        bad = ~(largest <= _LIMIT).all()
        tasks: list[Steps] = [_agreed(torch.cat([bad[None], largest > 0]))]
        for batch, turn in zip(self._batches, turns, strict=True):
            x = batch.join([gradients[name] for name in batch.names])
            if MEMORY in store.kept[batch]:
                x += store.kept[batch][MEMORY]
            if bad.device.type != "cpu" or bad:
                x.masked_fill_(bad, 0)
            tasks.append(batch.method.compress(x, turn))
        return tasks

    def _settled(
        self, ended: list[tuple[Tensor, Tensor | None]], turns: list[Turn], store: Store
    ) -> dict[str, Tensor]:
        """Keep what a worker's step leaves, if all are well; the means by name."""
        count = ended[0][0]
        ok, used = count[0] == 0, count[1:] > 0
        instead = torch.where(ok, 0.0, float("nan") if self.nonfinite == "nan" else 0.0)
        means: dict[str, Tensor] = {}
        each = used.split([len(batch.names) for batch in self._batches])
        for batch, turn, mine, (mean, rest) in zip(self._batches, turns, each, ended[1:], strict=True):
            for what, x in (("mean", mean), *([("rest", rest)] if batch.memory else [])):
                if x is None or x.shape != batch.shape:
                    raise ValueError(
                        f"{batch.method!r} must return a {what} of the shape {batch.shape} of its x"
                    )
            if batch.memory and rest is not None:
                turn.state[MEMORY] = rest
            store.commit(batch, turn.state, ok, mine)
            mean = batch.where(ok & mine, mean, instead.to(mean.dtype))
            means |= {n: x.to(batch.dtype) for n, x in zip(batch.names, batch.split(mean), strict=True)}
        return means

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by parameter name. Each worker has a memory of its own: save it on all of them."""
        if self._resumed is not None:
            return self._resumed
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
            "size": self.transport.size,
            "ranks": list(self.transport.ranks),
            "units": dict(self._units),
            "methods": self._stores[0].methods(),
            "shared": shared,
            "own": own,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. What another number of workers, or another worker, kept for itself is dropped, with a warning."""
        missing = {"steps", "size", "ranks", "units", "methods", "shared", "own"} - state.keys()
        if missing:
            raise ValueError(f"this is no compressor's state: it lacks {', '.join(sorted(missing))}")
        saved = (
            dict(zip(state["ranks"], state["own"], strict=True))
            if state["size"] == self.transport.size
            else {}
        )
        own: list[Named] = [saved.get(rank, {}) for rank in self.transport.ranks]
        lost = [rank for rank in self.transport.ranks if rank not in saved]
        if lost and any(state["own"]):
            warnings.warn(
                f"compression: rank {', '.join(map(str, lost))} of {self.transport.size} starts with empty memories; "
                f"those saved are of rank {', '.join(map(str, state['ranks']))} of {state['size']}",
                stacklevel=2,
            )
        loaded = [_copied(state["shared"], mine) for mine in own]
        self.steps, self._units = state["steps"], dict(state["units"])
        for store, named in zip(self._stores, loaded, strict=True):
            store.load(named, dict(state["methods"]))
        here = {"size": self.transport.size, "ranks": list(self.transport.ranks), "own": own}
        self._resumed = {**state, **here}


def _copied(*parts: Mapping[str, Mapping[str, Tensor]]) -> Named:
    """All parts in one, in memory of their own."""
    found: Named = {}
    for part in parts:
        for name, state in part.items():
            found.setdefault(name, {}).update({key: x.clone() for key, x in state.items()})
    return found


def _agreed(flags: Tensor) -> Steps:
    """How many workers raise each flag."""
    return (yield Sum(flags.float())), None
