"""`Step`: one exchange under way. Gradients come in, in any order; those of a part go out once it is complete."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .batch import Batch
from .hierarchy import Nodes
from .lockstep import Lockstep
from .method import Steps, Sum
from .store import MEMORY, Store
from .transport import Transport
from .turn import Turn

#: Larger norms count as infinite: sums of their squares would be. Below 1e-22 a norm is 0.
_LIMIT = 1e15


class Step:
    """Made by `Aggregator.begin`.

    Args:
        parts: what goes out together, as the methods' batches. With `nodes`: what each worker of a machine owns.
        turn: makes what a method may know, for a rank, what it keeps and a batch.
        instead: the means of a step that is not finite.
        ended: called when all is done.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Batch]],
        transport: Transport,
        stores: Sequence[Store],
        turn: Callable[[int, Store, Batch], Turn],
        nodes: Nodes | None,
        instead: float,
        device: torch.device,
        ended: Callable[[], None],
    ) -> None:
        self.parts, self.transport, self.stores, self.nodes = parts, transport, stores, nodes
        self.instead, self.device, self.ended = instead, device, ended
        self.turns = [
            {
                batch: turn(rank, store, batch)
                for i, part in enumerate(parts)
                if nodes is None or nodes.rank == i
                for batch in part
            }
            for rank, store in zip(transport.ranks, stores, strict=True)
        ]
        self.lockstep = Lockstep(transport)
        self.gradients: list[dict[str, Tensor]] = [{} for _ in stores]
        self.norms: list[dict[int, Tensor]] = [{} for _ in stores]  # of what goes out together
        every = [batch for part in parts for batch in part]
        self.number = {batch: i for i, batch in enumerate(every, 1)}  # of its task; 0: how all are
        self.owners = [[name for batch in part for name in batch.names] for part in parts]
        # on two levels nobody's part is complete before everything is there
        together = self.owners if nodes is None else [[name for names in self.owners for name in names]]
        self.together = {i: names for i, names in enumerate(together) if names}
        self.missing = {i: set(names) for i, names in self.together.items()}

    @torch.no_grad()
    def add(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """Some tensors of every worker here. Their first messages leave as soon as all of their part are there."""
        with self._working():
            for mine, more in zip(self.gradients, gradients, strict=True):
                mine |= {name: g for name, g in more.items() if g.numel()}
            for names in self.missing.values():
                names.difference_update(gradients[0])
            for i in [i for i, names in self.missing.items() if not names]:
                del self.missing[i]
                self._start(i)

    @torch.no_grad()
    def finish(self, out: Sequence[Mapping[str, Tensor]]) -> None:
        """Wait for the others, put the means into `out`, and keep what methods want to keep."""
        if self.missing:
            missing = sorted(set().union(*self.missing.values()))
            raise ValueError(
                f"gradients are missing, which were there in the step before: {', '.join(missing)}"
            )
        with self._working():
            ended = self.lockstep.finish()
            for worker in zip(ended, self.turns, self.stores, self.gradients, out, strict=True):
                self._settle(*worker)
        size = self.transport.size * (self.nodes.size if self.nodes else 1)
        self.transport.meter.step(sum(g.nbytes for g in self.gradients[0].values()), size)
        self.ended()

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self.transport.meter.part(self.device), torch.autocast(self.device.type, enabled=False):
            yield

    def _start(self, i: int) -> None:
        part = self.parts[i if self.nodes is None else self.nodes.rank]
        for gradients, norms in zip(self.gradients, self.norms, strict=True):
            norms[i] = _norms([gradients[name] for name in self.together[i]])
        each = [norms[i] for norms in self.norms]
        tasks = [
            self._tasks(part, *worker)
            for worker in zip(self.gradients, self.turns, self.stores, each, strict=True)
        ]
        agreements = [] if self.missing else [self._agreement(norms) for norms in self.norms]
        if len(self.together) == 1:  # else it would go with whichever part is last, which may differ
            for mine, agreement in zip(tasks, agreements, strict=True):
                mine[0] = agreement
        self.lockstep.start(tasks)
        if agreements and len(self.together) > 1:
            self.lockstep.start([{0: agreement} for agreement in agreements])

    def _agreement(self, norms: Mapping[int, Tensor]) -> Steps:
        """How many workers have something that is not finite, and for how many each tensor is not zero."""
        each = torch.cat([norms[i] for i in self.together])
        flags = torch.cat([_bad(each)[None], each > 0]).float()
        if self.nodes is not None:
            flags = self.nodes.inside.sum([flags])()[0]
        return _summed(flags)

    def _tasks(
        self,
        part: Sequence[Batch],
        gradients: Mapping[str, Tensor],
        turns: Mapping[Batch, Turn],
        store: Store,
        norms: Tensor,
    ) -> dict[int, Steps]:
        """The methods' work, on finite numbers only."""
        bad = _bad(norms)
        if self.nodes is not None:
            gradients, bad = self.nodes.down(self.owners, gradients, bad), torch.zeros_like(bad)
        xs = {batch: turns[batch].empty(batch.shape, batch.precision) for batch in part}
        _join(xs, gradients, {batch: kept[MEMORY] for batch, kept in store.kept.items() if MEMORY in kept})
        tasks = {}
        for batch, x in xs.items():
            if bad.device.type != "cpu" or bad:  # a GPU is not asked: that would take longer
                x.masked_fill_(bad, 0)
            steps = batch.method.compress(x, turns[batch])
            if not isinstance(steps, Generator):
                raise TypeError(
                    f"{type(batch.method).__name__}.compress must yield what it sends, and it does not yield"
                )
            tasks[self.number[batch]] = steps
        return tasks

    def _settle(
        self,
        ended: Mapping[int, tuple[Tensor, Tensor | None]],
        turns: Mapping[Batch, Turn],
        store: Store,
        gradients: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
    ) -> None:
        """Keep what a worker's step leaves, if all are well; put out the means."""
        count = ended[0][0]
        ok = count[0] == 0
        used = ok & (count[1:] > 0)
        instead = torch.where(ok, 0.0, self.instead)
        means: dict[str, Tensor] = {}
        each = dict(zip(self.number, used.split([len(batch.names) for batch in self.number]), strict=True))
        for batch in turns:
            mean, rest = ended[self.number[batch]]
            for what, x in (("mean", mean), *([("rest", rest)] if batch.memory else [])):
                if x is None or x.shape != batch.shape:
                    raise ValueError(
                        f"{batch.method!r} must return a {what} of the shape {batch.shape} of its x"
                    )
            store.commit(batch, turns[batch], rest if batch.memory else None, ok, each[batch])
            # what loses nothing, or no more than rounding, has zero for all zeros anyhow
            mask = ok if batch.method.kind in ("exact", "rounding") else each[batch]
            mean = batch.where(mask, mean, instead.to(mean.dtype))
            means.update(zip(batch.names, batch.split(mean), strict=True))
        if self.nodes is not None:
            means = self.nodes.up(self.owners, means, gradients)
        torch._foreach_copy_([out[name] for name in means], list(means.values()))


def _join(
    xs: Mapping[Batch, Tensor], gradients: Mapping[str, Tensor], memories: Mapping[Batch, Tensor]
) -> None:
    """Gradients and memories into the methods' tensors, in one call for each dtype."""
    for dtype in {batch.dtype for batch in xs}:
        some = {batch: x for batch, x in xs.items() if batch.dtype == dtype}
        places = [place for batch, x in some.items() for place in batch.split(x)]
        torch._foreach_copy_(places, [gradients[name] for batch in some for name in batch.names])
        old = {batch: memories[batch] for batch in some if batch in memories}
        if old:
            torch._foreach_add_([some[batch] for batch in old], list(old.values()))


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of each, the fastest thing that tells zeros and non-finite numbers."""
    found: dict[int, Tensor] = {}
    for dtype in {g.dtype for g in gradients}:
        some = {i: g for i, g in enumerate(gradients) if g.dtype == dtype}
        norms = torch._foreach_norm(list(some.values()), 2, dtype=torch.promote_types(dtype, torch.float32))
        found.update(zip(some, norms, strict=True))
    return torch.stack([found[i] for i in range(len(gradients))]).float()


def _bad(norms: Tensor) -> Tensor:
    return ~(norms <= _LIMIT).all()


def _summed(flags: Tensor) -> Steps:
    return (yield Sum(flags)), None
