"""`TwoStage`: quantized on the way to the owner of each shard, and again on the way from there to all workers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, MessageGenerator, Method, Scatter, StepContext


@dataclass(frozen=True)
class TwoStage(Method):
    """Base class of quantizers. Subclasses define `encode` and `decode`, between numbers and messages.

    Shards of every tensor are sent to their owners (all-to-all), and their means to all workers (all-gather). For contractions, the
    error of the first quantization is each worker's error feedback, that of the second is kept at the owner. With
    exchange="all_gather" everything is sent to all workers at once, and each computes the mean itself: one message and one
    quantization, but bytes that grow with the number of workers.
    """

    exchanges = ("all_to_all", "all_gather")

    @property
    def in_units(self) -> tuple[str, ...]:
        return ("owner",) if self.kind == "contraction" else ()

    @property
    def divided_state(self) -> tuple[str, ...]:
        return ("owner",)

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, worker: int, size: int) -> Tensor | None:
        if "owner" not in state:
            return None
        mine = state["owner"].reshape(-1)
        whole = mine.new_zeros(size, len(mine))
        whole[worker] = mine * size  # an error of the mean is `size` times that of one worker's gradient
        return whole.view(-1)[: shape.numel()].view(shape)

    def keeps_errors(self, ctx: StepContext) -> bool:
        """Whether `compress` returns the error of the first quantization and keeps that of the second."""
        return self.kind == "contraction" and ctx.error_feedback

    def shard(self, d: int, shards: int) -> int:
        """Number of elements of a shard, a multiple of 8, so that `shards` of them hold d."""
        return -(-d // (8 * shards)) * 8

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        """Encode x (b, shards, s) to tensors (b, shards, …). Of x, n elements are data, the rest padding; `spare`: scratch."""
        raise NotImplementedError

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Decode messages into `out` (b, shards, s) and return it."""
        raise NotImplementedError

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        b, d = x.shape
        direct = ctx.exchange == "all_gather"
        shards, owner = (1, 0) if direct else (ctx.size, ctx.worker)
        s = self.shard(d, shards)
        feedback = self.keeps_errors(ctx)
        spare = ctx.empty((b, shards, s), x.dtype)
        sent = self.encode(_padded(x, shards * s, ctx).view(b, shards, s), d, spare, ctx)
        if feedback:
            x -= self.decode(sent, spare).view(b, -1)[:, :d]
        if direct:
            received = yield Gather(sent)
        else:
            received = yield Scatter(tuple(tuple(t[:, j : j + 1] for t in sent) for j in range(shards)))

        mean = self.decode(received[0], ctx.empty((b, 1, s), x.dtype))
        small = spare.view(-1)[: b * s].view(b, 1, s)
        for theirs in received[1:]:
            mean += self.decode(theirs, small)
        if ctx.size > 1:
            mean /= ctx.size
        rest = x if feedback else None
        if direct and self.kind != "vote":
            return mean.view(b, s)[:, :d], rest
        n = min(max(d - owner * s, 0), s)
        mean[..., n:] = 0
        if feedback and "owner" in ctx.state:
            mean += ctx.state["owner"][:, None]
        back = self.encode(mean, n, small, ctx)
        if feedback:
            ctx.state["owner"] = (mean - self.decode(back, small)).squeeze(1)
            ctx.state["owner"][:, n:] = 0
        averages = [back] if direct else (yield Gather(back))
        parts = spare.view(shards, b, 1, s)
        for part, average in zip(parts, averages, strict=True):
            self.decode(average, part)
        return _joined(parts.squeeze(2), ctx)[:, :d], rest


def even(n: int, most: int, multiple: int = 1) -> tuple[int, int]:
    """Number of blocks of at most `most` that hold n elements, and their common size, rounded up to a multiple.

    >>> even(513, 512, multiple=8), even(1024, 512, multiple=8), even(3, 512)
    ((2, 264), (2, 512), (1, 3))
    """
    many = -(-n // most)
    return many, -(-n // (many * multiple)) * multiple


def _padded(x: Tensor, width: int, ctx: StepContext) -> Tensor:
    """x (b, d) padded with zeros."""
    if x.shape[1] == width:
        return x
    wide = ctx.empty((len(x), width), x.dtype)
    wide[:, : x.shape[1]] = x
    wide[:, x.shape[1] :] = 0
    return wide


def _joined(parts: Tensor, ctx: StepContext) -> Tensor:
    """Shards (shards, b, s) as (b, shards·s)."""
    shards, b, s = parts.shape
    if shards > 1 and b > 1:
        parts = ctx.empty((b, shards, s), parts.dtype).copy_(parts.transpose(0, 1))
    return parts.view(b, shards * s)
