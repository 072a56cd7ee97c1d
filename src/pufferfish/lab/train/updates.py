"""`Updates`: one update after the other: batches, forward and backward passes, clipping, the optimizer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..rivals import SAM
from ..tasks.task import Batch
from .graph import Graph
from .parts import Parts


class Updates:
    """One update after the other, each as it comes or by a CUDA graph.

    It also keeps what a task carries from batch to batch, for checkpoints in the middle of an epoch.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.ranks = [parts.rank]  # the workers that compute here
        self._carried: list[Tensor] = []
        self._restored: list[Tensor] = []  # waits for the next batch
        self.changed()

    def changed(self) -> None:
        """The model has other layers from now on: what was recorded is for the old ones."""
        p = self.parts
        self._run: Callable[..., Tensor] = Graph(self._update, p.optimizer) if p.given.graph else self._update

    def begin(self, epoch: int, start: int) -> None:
        """The epoch's batches, from update `start` on."""
        self._batches = [self._epoch(epoch, start, rank) for rank in self.ranks]
        if not start:
            self._restored = []

    def update(self, lr: float) -> Tensor:
        """Train on the next batch; the loss, of the first worker here, is a tensor that nobody has waited for."""
        for group in self.parts.optimizer.param_groups:
            group["lr"] = lr
        return self._run(*self._next())

    def state_dict(self) -> dict[str, Any]:
        """What the next batch of this epoch needs."""
        return {"carried": [x.clone() for x in self._carried]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._restored = list(state["carried"])

    def _epoch(self, epoch: int, start: int, rank: int) -> Iterator[Batch]:
        p, passes = self.parts, self.parts.given.accumulate
        generator = torch.Generator().manual_seed(_seed(p.given.seed, epoch))
        return p.task.batches(
            p.data, "train", p.given.recipe.batch // passes, device=p.device, generator=generator,
            rank=rank, size=p.size, start=start * passes,
        )  # fmt: skip

    def _next(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of all batches of an update, worker by worker, pass by pass; then those that are carried."""
        inputs: list[Tensor] = []
        carries = self.parts.task.carries
        self._carried = []
        for batches in self._batches:
            for i in range(self.parts.given.accumulate):
                batch = next(batches)
                inputs += batch[: len(batch) - carries]
                self._carried += batch[len(batch) - carries :] if i == 0 else ()  # the same in all
        for x, saved in zip(self._carried, self._restored, strict=False):
            x.copy_(saved)
        self._restored = []
        return inputs, self._carried

    def _of(self, worker: int, inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> list[Batch]:
        """A worker's batches, from what `_next` has made of them."""
        workers, passes = len(self.ranks), self.parts.given.accumulate
        wide, carries = len(inputs) // (workers * passes), len(carried) // workers
        own = carried[worker * carries : (worker + 1) * carries]
        first = worker * passes
        return [(*inputs[i * wide : (i + 1) * wide], *own) for i in range(first, first + passes)]

    def _update(self, inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        """Everything between a batch and the next; a graph may hold it."""
        batches, optimizer = self._of(0, inputs, carried), self.parts.optimizer
        if isinstance(optimizer, SAM):
            before = [x.clone() for x in carried]
            with optimizer.alone():
                total = self._backward(batches)
            for x, old in zip(carried, before, strict=True):
                x.copy_(old)
            with optimizer.perturbed():
                self._backward(batches)
        else:
            total = self._backward(batches)
        self._step()
        return total

    def _backward(self, batches: Sequence[Batch]) -> Tensor:
        """All passes of an update; the mean loss."""
        total = torch.zeros((), device=self.parts.device)
        for i, batch in enumerate(batches, start=1):
            with contextlib.nullcontext() if i == len(batches) else self._unsynchronised():
                loss = self._loss(batch) / len(batches)
                self.parts.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _loss(self, batch: Batch) -> Tensor:
        p = self.parts
        with p.given.autocast:
            return p.task.loss(p.model, batch, p.given.recipe)

    def _unsynchronised(self) -> Any:
        model: Any = getattr(self.parts.model, "_orig_mod", self.parts.model)
        return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()

    def _step(self) -> None:
        p = self.parts
        if p.given.recipe.clip is not None:
            p.scaler.unscale_(p.optimizer)
            nn.utils.clip_grad_norm_(p.bare.parameters(), p.given.recipe.clip)
        if p.given.graph:
            _align(p.bare)
        p.scaler.step(p.optimizer)
        p.scaler.update()
        p.optimizer.zero_grad()


def _align(model: nn.Module) -> None:
    """Gradients in their parameters' strides, which fused optimizers insist on, also where a dimension has one element."""
    for p in model.parameters():
        if p.grad is None or p.grad.stride() == p.stride():
            continue
        pairs = zip(p.shape, p.stride(), p.grad.stride(), strict=True)
        if all(a == b for n, a, b in pairs if n > 1):
            p.grad = p.grad.as_strided(p.shape, p.stride())
        else:
            p.grad = torch.empty_like(p).copy_(p.grad)


def _seed(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7], "big")
