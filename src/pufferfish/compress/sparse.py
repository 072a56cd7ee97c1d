"""Sparsifiers: a few elements of each gradient, the largest or random ones; the rest waits in the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .method import Gather, Method, Steps, Sum, check_count, count
from .turn import Turn


@dataclass(frozen=True)
class TopK(Method):
    """The k elements of largest magnitude, each worker its own: values and indices, all-gathered.

    Args:
        k: a share (0.01) of each tensor's elements, or a number of them (100).

    >>> TopK(k=0.001)
    TopK(k=0.001)
    """

    k: float | int = 0.01

    sparse = True

    def __post_init__(self) -> None:
        check_count("TopK", self.k)

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        i = x.abs().topk(count(self.k, x.shape[1]), sorted=False).indices
        return gathered(x, i, turn)


@dataclass(frozen=True)
class RandomK(Method):
    """k random elements, drawn anew in every step.

    Args:
        k: a share (0.01) of each tensor's elements, or a number of them (100).
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
        check_count("RandomK", self.k)
        if self.coordinates not in ("shared", "own"):
            raise ValueError(f'RandomK: coordinates={self.coordinates!r} is neither "shared" nor "own"')

    @property
    def kind(self) -> str:
        return "unbiased" if self.scale else "contraction"

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        d = x.shape[1]
        k = count(self.k, d)
        stream = turn.shared if self.coordinates == "shared" else turn.own
        i = torch.rand(x.shape, device=x.device, generator=stream).topk(k, sorted=False).indices
        if self.scale:
            x *= d / k
        if self.coordinates == "own":
            return (yield from gathered(x, i, turn))
        total = yield Sum(x.gather(1, i))
        return torch.zeros_like(x).scatter_(1, i, total / turn.size), x.scatter_(1, i, 0)


def gathered(x: Tensor, i: Tensor, turn: Turn) -> Steps:
    """The mean of what all workers send of x, each at indices of its own."""
    everyone = yield Gather((x.gather(1, i), i.int() if x.shape[1] < 2**31 else i))
    mean = torch.zeros_like(x)
    for values, indices in everyone:
        mean.scatter_add_(1, indices.long(), values)
    return mean.div_(turn.size), x.scatter_(1, i, 0)
