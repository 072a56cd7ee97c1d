"""`Store`: what a worker keeps from step to step: its memory, and what methods want to find again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .batch import Batch
from .turn import Turn

#: The key of the memory; the others are the methods' own.
MEMORY = "memory"
#: Parameter name → key → tensor.
Named = dict[str, dict[str, Tensor]]


class Store:
    """In the methods' batches while training, by parameter name in files."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.kept: dict[Batch, dict[str, Tensor]] = {}
        self.scratch: dict[Batch, list[Tensor]] = {}  # see `Turn.empty`
        self._loaded: Named = {}
        self._methods: Mapping[str, str] = {}  # whose state was loaded: parameter name → method

    def arrange(self, batches: Sequence[Batch], device: torch.device) -> None:
        """Bring what is kept into these batches. What parameters that are gone have left is dropped.

        A memory goes with its parameter to any method, other state only to the same method.
        """
        if self._loaded or list(self.kept) != list(batches):
            named, methods = self.named(), self.methods()
            self._release(named, batches)
            self.kept = {batch: _collected(batch, named, methods, device) for batch in batches}
            self._loaded, self.scratch = {}, {batch: [] for batch in batches}

    def _release(self, named: Named, batches: Sequence[Batch]) -> None:
        """What a method has not sent becomes a memory where another one follows."""
        after = {name: whose for batch in batches for name, whose in _whose(batch).items()}
        for batch in self.kept:
            for (name, whose), shape in zip(_whose(batch).items(), batch.shapes, strict=True):
                if name in named and after.get(name, whose) != whose:
                    left = batch.method.unsent(named[name], shape, self.rank, self.size)
                    if left is not None:
                        old = named[name].get(MEMORY)
                        named[name][MEMORY] = left if old is None else left + old

    @property
    def remembers(self) -> bool:
        """Whether there is a memory."""
        return any(MEMORY in kept for kept in (*self.kept.values(), *self._loaded.values()))

    def commit(self, batch: Batch, turn: Turn, rest: Tensor | None, ok: Tensor, each: Tensor) -> None:
        """Keep a step's state: nothing of a step that is not `ok`, and of `each` parameter for which that is true.

        Without asking the device, save when there is something for the first time.
        """
        kept = self.kept[batch]
        self._remember(batch, kept, turn, rest, each)
        for key, value in turn.state.items():
            old = kept.get(key)
            if old is not None and old.shape == value.shape:
                kept[key] = value if value is old else batch.where(each, value, old)
            elif bool(ok):  # what is in units of gradients that nobody had stays at zero
                ours = key in batch.method.in_units
                kept[key] = batch.where(each, value, torch.zeros_like(value)) if ours else value

    def _remember(
        self, batch: Batch, kept: dict[str, Tensor], turn: Turn, rest: Tensor | None, each: Tensor
    ) -> None:
        """The new memory, in the place of the old one: `rest` may lie in memory that the next step uses again."""
        old = kept.get(MEMORY)
        if rest is None:
            if old is not None:  # left by another method, and sent with this step
                kept[MEMORY] = batch.where(each, torch.zeros_like(old), old)
                if not bool(kept[MEMORY].any()):
                    del kept[MEMORY]
        elif old is None:
            kept[MEMORY] = batch.where(each, rest.clone(), torch.zeros_like(rest))
        elif (new := batch.where(each, rest, old)) is not rest:
            kept[MEMORY] = new
        elif turn.lends(rest):  # x itself: it becomes the memory, and the old memory the next step's x
            kept[MEMORY] = turn.swap(rest, old)
        else:
            old.copy_(rest)

    def rescale(self, factors: Mapping[str, float], scale: float) -> None:
        """Multiply what is in the gradients' units, by parameter name, and what follows the loss scale."""
        for batch, kept in self.kept.items():
            for key in kept.keys() & set(batch.method.in_scale if scale != 1 else ()):
                kept[key].mul_(scale)
            mine = [factors.get(name, 1.0) for name in batch.names]
            if all(f == 1 for f in mine):
                continue
            for key in kept.keys() & {MEMORY, *batch.method.in_units}:
                if all(f == mine[0] for f in mine):
                    kept[key].mul_(mine[0])
                else:
                    pieces = [x * f for x, f in zip(batch.unstack(kept[key]), mine, strict=True)]
                    scaled = batch.stack(pieces)
                    assert scaled is not None
                    kept[key] = scaled

    def named(self) -> Named:
        """All of it by parameter name."""
        if self._loaded:
            return self._loaded
        found: Named = {}
        for batch, kept in self.kept.items():
            for key, tensor in kept.items():
                for name, piece in zip(batch.names, batch.unstack(tensor), strict=True):
                    found.setdefault(name, {})[key] = piece
        return found

    def methods(self) -> dict[str, str]:
        """Whose state it is, by parameter name."""
        if self._loaded:
            return dict(self._methods)
        return {name: whose for batch in self.kept for name, whose in _whose(batch).items()}

    def load(self, named: Named, methods: Mapping[str, str]) -> None:
        """Go on from this, once the batches are known."""
        self.kept, self._loaded, self._methods = {}, named, methods


def _whose(batch: Batch) -> dict[str, str]:
    """By parameter name: state is for the same method and shape only."""
    return {
        name: f"{batch.method!r} {tuple(shape)}"
        for name, shape in zip(batch.names, batch.shapes, strict=True)
    }


def _collected(
    batch: Batch, named: Named, methods: Mapping[str, str], device: torch.device
) -> dict[str, Tensor]:
    """What a batch finds of its own among everything kept."""
    mine = []
    whose = _whose(batch)
    for name, shape in zip(batch.names, batch.shapes, strict=True):
        same = methods.get(name) == whose[name]
        state = {key: x.to(device) for key, x in named.get(name, {}).items() if same or key == MEMORY}
        if MEMORY in state and state[MEMORY].shape != shape:
            del state[MEMORY]
        mine.append(state)
    found = {}
    for key in sorted({key for state in mine for key in state}):
        like_gradients = all(
            s[key].shape == shape for s, shape in zip(mine, batch.shapes, strict=True) if key in s
        )
        if like_gradients or key in batch.method.in_units:  # nothing kept is nothing left over
            x, like = next((s[key], shape) for s, shape in zip(mine, batch.shapes, strict=True) if key in s)
            for state, shape in zip(mine, batch.shapes, strict=True):
                state.setdefault(key, x.new_zeros(shape if x.shape == like else x.shape))
        if all(key in state for state in mine):
            stacked = batch.stack([state[key] for state in mine])
            if stacked is not None:
                found[key] = stacked
    return found
