"""Sparsifiers: a few elements of each gradient, the largest or random ones; the rest is kept as error feedback."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..method import Gather, MessageGenerator, Method, StepContext, Sum, check_count, count


@dataclass(frozen=True)
class TopK(Method):
    """Sends the k elements of largest magnitude of each worker: values and indices, all-gathered.

    Args:
        k: A share (0.01) of each tensor's elements, or a number of them (100).
        sample: Share of the elements from which the threshold magnitude is estimated. Below 1 it is faster and approximate:
            messages keep their size, elements that do not fit are kept back, and some space may stay empty. The sample is
            large enough to hold about 64 elements above the threshold.

    >>> TopK(k=0.001)
    TopK(k=0.001, sample=1.0)
    """

    k: float | int = 0.01
    sample: float = 1.0

    sparse = True
    exchanges = ("all_gather",)

    def __post_init__(self) -> None:
        check_count("TopK", self.k)
        if not 0 < self.sample <= 1:
            raise ValueError(f"TopK: sample={self.sample!r} is not a share in (0, 1]")

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        i, used = largest_indices(x, count(self.k, x.shape[1]), self.sample, ctx)
        values = x.view(-1)[i]
        if isinstance(used, Tensor):
            values *= used
        return gather_sparse(x, i, values, ctx)


@dataclass(frozen=True)
class RandomK(Method):
    """Sends k random elements, drawn again in every step.

    Args:
        k: A share (0.01) of each tensor's elements, or a number of them (100). One is drawn from each of k neighbouring
            runs of equal length, which is fast and gives every element the same probability.
        coordinates: "shared": the same elements on all workers, so that an all-reduce of the values is enough;
            "own": each worker draws its own, all-gathered with their indices.
        scale: Multiply by d/k, which makes it unbiased, without error feedback.

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

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        b, d = x.shape
        k = count(self.k, d)
        i = _flat(draw_indices(b, d, k, ctx.shared_rng if self.coordinates == "shared" else ctx.own_rng), d)
        values = x.view(-1)[i]
        if self.scale:
            values *= d / k
        if self.coordinates == "own":
            return (yield from gather_sparse(x, i, values, ctx))
        total = yield Sum(values)
        mean = ctx.empty(x.shape, x.dtype).zero_()
        mean.view(-1).index_copy_(0, i, total.div_(ctx.size))
        x.view(-1).index_fill_(0, i, 0)
        return mean, x


def gather_sparse(x: Tensor, i: Tensor, values: Tensor, ctx: StepContext) -> MessageGenerator:
    """Return the mean of the values that all workers send, each at its own indices into flat x, and the rest of x."""
    everyone = yield Gather((values, i.int() if x.numel() < 2**31 else i))
    mean = ctx.empty(x.shape, x.dtype).zero_()
    for theirs, where in everyone:
        mean.view(-1).index_add_(0, where, theirs, alpha=1 / ctx.size)
    x.view(-1).index_add_(0, i, values, alpha=-1)
    return mean, x


def largest_indices(x: Tensor, k: int, sample: float, ctx: StepContext) -> tuple[Tensor, Tensor | int]:
    """Indices into flat x (b, d) of about the k largest elements of each row, b·k in all, and which of them are valid.

    The second result is 1 if all are valid, else a mask.
    """
    b, d = x.shape
    size = torch.abs(x, out=ctx.empty(x.shape, x.dtype))
    seen = max(math.ceil(sample * d), 64 * d // k)
    if sample == 1 or seen >= d or k == d:
        return _flat(size.topk(k, sorted=False).indices, d), 1
    few = size.gather(1, torch.randint(d, (b, seen), device=x.device, generator=ctx.own_rng))
    bound = few.topk(max(1, round(k / d * seen)), sorted=False).values.amin(1, keepdim=True)
    bound.clamp_min_(torch.finfo(x.dtype).tiny)  # zeros are never sent
    large = torch.ge(size, bound, out=ctx.empty(x.shape, torch.bool)).view(-1)
    begin = ctx.step * 0x9E3779B1 % (b * d)  # another start in every step: elements at the end may not fit
    large = torch.cat([large[begin:], large[:begin]], out=ctx.empty((b * d,), torch.bool))
    i = torch.nonzero_static(large, size=b * k, fill_value=-1).squeeze(1)
    return (i + begin).remainder_(b * d), i >= 0


def draw_indices(b: int, d: int, k: int, rng: torch.Generator) -> Tensor:
    """Draw (b, k) different indices below d, all equally likely: one from each of k runs, with a random start."""
    begin = torch.randint(d, (b, 1), device=rng.device, generator=rng)
    ends = torch.arange(k + 1, device=rng.device) * d // k
    chance = torch.rand(b, k, dtype=torch.float64, device=rng.device, generator=rng)
    return (begin + ends[:-1] + (chance * ends.diff()).long()).remainder_(d)


def _flat(i: Tensor, d: int) -> Tensor:
    """Convert indices into rows of d elements to indices into all rows, in place."""
    b = len(i)
    return (i.add_(torch.arange(0, b * d, d, device=i.device)[:, None]) if b > 1 else i).view(-1)
