"""`TwoStage`: rounded on the way to the owner of each shard, and once more on the way from there to all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Gather, Method, Scatter, Steps
from ..turn import Turn


@dataclass(frozen=True)
class TwoStage(Method):
    """What signs, levels and blocks have in common; they say how numbers become messages and messages numbers.

    Shards of every tensor go to their owners (all-to-all), and their means to all (all-gather). What the first
    rounding loses waits in each worker's memory, what the second loses in one at the owner, for contractions. With
    exchange="all_gather" everything goes to all at once, and each worker takes the mean itself: one message and one
    rounding, but bytes that grow with the number of workers.
    """

    exchanges = ("all_to_all", "all_gather")

    @property
    def in_units(self) -> tuple[str, ...]:
        return ("owner",) if self.kind == "contraction" else ()

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, rank: int, size: int) -> Tensor | None:
        if "owner" not in state:
            return None
        mine = state["owner"].reshape(-1)
        whole = mine.new_zeros(size, len(mine))
        whole[rank] = mine * size  # it is in units of the mean
        return whole.view(-1)[: shape.numel()].view(shape)

    def shard(self, d: int, shards: int) -> int:
        """The elements of a shard, so that `shards` of them hold d; a multiple of 8."""
        return -(-d // (8 * shards)) * 8

    def encode(self, x: Tensor, n: int, spare: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        """Messages (b, shards, …) for x (b, shards, s): n elements and then zeros. `spare` is memory like x, to be used."""
        raise NotImplementedError

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """The numbers in messages, put into `out` (b, shards, s), which is returned."""
        raise NotImplementedError

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        b, d = x.shape
        alone = turn.exchange == "all_gather"
        shards, rank = (1, 0) if alone else (turn.size, turn.rank)
        s = self.shard(d, shards)
        remembers = self.kind == "contraction" and turn.memory
        spare = turn.empty((b, shards, s), x.dtype)
        sent = self.encode(_filled(x, shards * s, turn).view(b, shards, s), d, spare, turn)
        if remembers:
            x -= self.decode(sent, spare).view(b, -1)[:, :d]
        if alone:
            received = yield Gather(sent)
        else:
            received = yield Scatter(tuple(tuple(t[:, j : j + 1] for t in sent) for j in range(shards)))

        mean = self.decode(received[0], turn.empty((b, 1, s), x.dtype))
        small = spare.view(-1)[: b * s].view(b, 1, s)
        for theirs in received[1:]:
            mean += self.decode(theirs, small)
        if turn.size > 1:
            mean /= turn.size
        rest = x if remembers else None
        if alone and self.kind != "vote":
            return mean.view(b, s)[:, :d], rest
        n = min(max(d - rank * s, 0), s)
        mean[..., n:] = 0
        if remembers and "owner" in turn.state:
            mean += turn.state["owner"][:, None]
        back = self.encode(mean, n, small, turn)
        if remembers:
            turn.state["owner"] = (mean - self.decode(back, small)).squeeze(1)
            turn.state["owner"][:, n:] = 0
        averages = [back] if alone else (yield Gather(back))
        parts = spare.view(shards, b, 1, s)
        for part, average in zip(parts, averages, strict=True):
            self.decode(average, part)
        return _joined(parts.squeeze(2), turn)[:, :d], rest


def even(n: int, most: int, multiple: int = 1) -> tuple[int, int]:
    """How many blocks of at most `most` hold n elements, and the size they all can have, rounded up to a multiple.

    >>> even(513, 512, multiple=8), even(1024, 512, multiple=8), even(3, 512)
    ((2, 264), (2, 512), (1, 3))
    """
    many = -(-n // most)
    return many, -(-n // (many * multiple)) * multiple


def _filled(x: Tensor, width: int, turn: Turn) -> Tensor:
    """x (b, d) with zeros behind it."""
    if x.shape[1] == width:
        return x
    wide = turn.empty((len(x), width), x.dtype)
    wide[:, : x.shape[1]] = x
    wide[:, x.shape[1] :] = 0
    return wide


def _joined(parts: Tensor, turn: Turn) -> Tensor:
    """Shards (shards, b, s) as (b, shards·s)."""
    shards, b, s = parts.shape
    if shards > 1 and b > 1:
        parts = turn.empty((b, shards, s), parts.dtype).copy_(parts.transpose(0, 1))
    return parts.view(b, shards * s)
