"""Sparsifiers: a few elements of each gradient, the largest or random ones; the rest waits in the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..method import Gather, Method, Steps, Sum, check_count, count
from ..turn import Turn


@dataclass(frozen=True)
class TopK(Method):
    """The k elements of largest magnitude, each worker its own: values and indices, all-gathered.

    Args:
        k: a share (0.01) of each tensor's elements, or a number of them (100).
        sample: the share of the elements that is looked at to find out from which magnitude on they are sent. Below 1
            it is faster and right by and large: messages keep their size, what does not fit in waits, and space may
            be left. At least so many are looked at that 64 of them should be sent.

    >>> TopK(k=0.001)
    TopK(k=0.001, sample=1.0)
    """

    k: float | int = 0.01
    sample: float = 1.0

    sparse = True
    exchanges = ("all_gather",)

    def __post_init__(self) -> None:
        check_count("TopK", self.k)
        check_sample("TopK", self.sample)

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        i, used = largest(x, count(self.k, x.shape[1]), self.sample, turn)
        values = x.view(-1)[i]
        if isinstance(used, Tensor):
            values *= used
        return gathered(x, i, values, turn)


@dataclass(frozen=True)
class RandomK(Method):
    """k random elements, drawn anew in every step.

    Args:
        k: a share (0.01) of each tensor's elements, or a number of them (100). They are drawn from k neighbouring runs
            of equal length, one from each, which is quick and gives every element the same chance.
        coordinates: "shared": the same elements on all workers, so that an all-reduce of the values is enough;
            "own": each worker its own, all-gathered with their indices.
        scale: multiply by d/k, which makes it unbiased, to be used without a memory.

    >>> RandomK(scale=True).kind
    'unbiased'
    """

    k: float | int = 0.01
    coordinates: Literal["shared", "own"] = "shared"
    scale: bool = False

    sparse = True

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_count(who, self.k)
        if self.coordinates not in ("shared", "own"):
            raise ValueError(f'{who}: coordinates={self.coordinates!r} is neither "shared" nor "own"')

    @property
    def kind(self) -> str:
        return "unbiased" if self.scale else "contraction"

    @property
    def exchanges(self) -> tuple[str, ...]:
        return ("all_reduce",) if self.coordinates == "shared" else ("all_gather",)

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        b, d = x.shape
        k = count(self.k, d)
        i = _flat(drawn(b, d, k, turn.shared if self.coordinates == "shared" else turn.own), d)
        values = x.view(-1)[i]
        if self.scale:
            values *= d / k
        if self.coordinates == "own":
            return (yield from gathered(x, i, values, turn))
        total = yield Sum(values)
        mean = turn.empty(x.shape, x.dtype).zero_()
        mean.view(-1).index_copy_(0, i, total.div_(turn.size))
        x.view(-1).index_fill_(0, i, 0)
        return mean, x


def gathered(x: Tensor, i: Tensor, values: Tensor, turn: Turn) -> Steps:
    """The mean of what all workers send, each at indices of its own into all of x, and what is left of x."""
    everyone = yield Gather((values, i.int() if x.numel() < 2**31 else i))
    mean = turn.empty(x.shape, x.dtype).zero_()
    for theirs, where in everyone:
        mean.view(-1).index_add_(0, where, theirs, alpha=1 / turn.size)
    x.view(-1).index_add_(0, i, values, alpha=-1)
    return mean, x


def largest(x: Tensor, k: int, sample: float, turn: Turn) -> tuple[Tensor, Tensor | int]:
    """Indices into all of x (b, d) of about the k largest in each row, b·k together; 0 for those that do not count, else 1.

    That is a plain 1 where all count.
    """
    b, d = x.shape
    size = torch.abs(x, out=turn.empty(x.shape, x.dtype))
    seen = max(math.ceil(sample * d), 64 * d // k)
    if sample == 1 or seen >= d or k == d:
        return _flat(size.topk(k, sorted=False).indices, d), 1
    few = size.gather(1, torch.randint(d, (b, seen), device=x.device, generator=turn.own))
    bound = few.topk(max(1, round(k / d * seen)), sorted=False).values.amin(1, keepdim=True)
    bound.clamp_min_(torch.finfo(x.dtype).tiny)  # zeros are never sent
    large = torch.ge(size, bound, out=turn.empty(x.shape, torch.bool)).view(-1)
    begin = turn.step * 0x9E3779B1 % (b * d)  # elsewhere in every step: whoever comes last may have to wait
    large = torch.cat([large[begin:], large[:begin]], out=turn.empty((b * d,), torch.bool))
    i = torch.nonzero_static(large, size=b * k, fill_value=-1).squeeze(1)
    return (i + begin).remainder_(b * d), i >= 0


def drawn(b: int, d: int, k: int, stream: torch.Generator) -> Tensor:
    """(b, k) different indices below d, each with the same chance: one from each of k runs, the first of which starts anywhere."""
    begin = torch.randint(d, (b, 1), device=stream.device, generator=stream)
    ends = torch.arange(k + 1, device=stream.device) * d // k
    chance = torch.rand(b, k, dtype=torch.float64, device=stream.device, generator=stream)
    return (begin + ends[:-1] + (chance * ends.diff()).long()).remainder_(d)


def check_sample(who: str, sample: float) -> None:
    """Refuse what is no share."""
    if not 0 < sample <= 1:
        raise ValueError(f"{who}: sample={sample!r} is not a share in (0, 1]")


def _flat(i: Tensor, d: int) -> Tensor:
    """Indices into rows of d as indices into all of them, in their place."""
    b = len(i)
    return (i.add_(torch.arange(0, b * d, d, device=i.device)[:, None]) if b > 1 else i).view(-1)
