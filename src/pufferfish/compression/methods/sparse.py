"""Sparsifiers: a few elements of each gradient, the largest or random ones; the rest is kept as error feedback.

Threshold is Strom, 2015; DGC is Deep Gradient Compression (Lin et al., 2018); SparseLoCo is Sarfi et al., 2025.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..method import Gather, Kept, MessageGenerator, Method, StepContext, Sum, check_whole
from .quantized import even, pack, signed_levels, two_levels, unpack


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

    layout = "elements"
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

    layout = "elements"

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


@dataclass(frozen=True)
class BlockRandomK(RandomK):
    """Sends k consecutive elements from a start drawn uniformly in every step, with wrap-around.

    The wrap-around gives every element the same probability k/d. Reading and writing consecutive elements is cheaper than
    single ones; but neighbours are similar, so they carry less information about the gradient.

    Args:
        k: A share (0.01) of each tensor's elements, or a number of them (100).
        coordinates: "shared": the same elements on all workers, so that an all-reduce of the values is enough;
            "own": each worker draws its own start, all-gathered with the values.
        scale: Multiply by d/k, which makes it unbiased, without error feedback.

    >>> BlockRandomK(k=100, coordinates="own")
    BlockRandomK(k=100, coordinates='own', scale=False)
    """

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        b, d = x.shape
        k = count(self.k, d)
        rng = ctx.shared_rng if self.coordinates == "shared" else ctx.own_rng
        start = torch.randint(d, (b, 1), device=x.device, generator=rng)
        run = torch.arange(k, device=x.device)
        i = (start + run) % d
        if self.scale:
            x *= d / k
        mean = ctx.empty(x.shape, x.dtype).zero_()
        if self.coordinates == "shared":
            total = yield Sum(x.gather(1, i))
            mean.scatter_(1, i, total)
        else:
            everyone = yield Gather((x.gather(1, i), start.int() if d < 2**31 else start))
            for values, begin in everyone:
                mean.scatter_add_(1, (begin + run) % d, values)
        return mean.div_(ctx.size), x.scatter_(1, i, 0)


@dataclass(frozen=True)
class Threshold(Method):
    """Sends τ·sgn(xᵢ) where `|xᵢ| > τ`, at indices of each worker's own, all-gathered.

    An element is sent as one integer, 2·index + sign. The number of elements differs between workers, so the counts are gathered
    first and messages are padded to the largest. Two bits for every element would need no counts, but compress at most
    16 times; elements beyond a useful τ are rarer than that.

    Args:
        tau: τ, in the units of the gradients, loss scale included. Higher → fewer bytes. Gradients differ by orders of
            magnitude between models, so inspect yours first: with too low a τ more bytes are sent than without
            compression, and large elements are delayed.

    >>> Threshold(tau=0.01)
    Threshold(tau=0.01)
    """

    tau: float = 1e-3

    layout = "elements"
    exchanges = ("all_gather",)

    def __post_init__(self) -> None:
        if not 0 < self.tau < math.inf:
            raise ValueError(f"Threshold: tau={self.tau!r} is not a finite number > 0")

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        flat = x.view(-1)  # τ is the same for all b tensors
        size = torch.abs(flat, out=ctx.empty(flat.shape, x.dtype))
        i = torch.gt(size, self.tau, out=ctx.empty(flat.shape, torch.bool)).nonzero().squeeze(1)
        negative = flat[i] < 0
        counts = yield Gather((torch.tensor([len(i)], device=x.device),))
        lengths = torch.cat([n for (n,) in counts]).tolist()
        code = torch.zeros(
            max(lengths), dtype=torch.int32 if len(flat) < 2**30 else torch.int64, device=x.device
        )
        code[: len(i)] = 2 * i + negative
        everyone = yield Gather((code,))
        mean = size.zero_()
        for (theirs,), n in zip(everyone, lengths, strict=True):
            sign = 1 - 2 * (theirs[:n] & 1).to(x.dtype)
            mean.index_add_(0, theirs[:n] >> 1, sign, alpha=self.tau / ctx.size)
        flat.index_add_(0, i, 1 - 2 * negative.to(x.dtype), alpha=-self.tau)
        return mean.view_as(x), x


@dataclass(frozen=True)
class DGC(Method):
    """u = m·u + g, v = v + u; the largest of v are sent, and v and u become zero there.

    v accumulates gradients with momentum; zeroing u stops the momentum of the elements just sent. The optimizer's own
    momentum must be off. Tensors that are sent uncompressed (1-D and small ones) get no momentum here. As in the paper, u
    and v are sums of gradients: when the learning rate falls, accumulated ones are applied with the lower rate. Gradients are not clipped before they are accumulated.

    Args:
        sparsity: Share of elements that is not sent. Higher → fewer bytes.
        momentum: m.
        warm_up: Steps of each stage of lower sparsity at the start: 75 %, 93.75 %, 98.44 %, 99.6 %, that is 1 − 4^-i in
            stage i, as long as that is below `sparsity`. 0: no such stages.

    >>> [round(DGC(warm_up=100).sparsity_at(step), 4) for step in (0, 99, 100, 399, 400)]
    [0.75, 0.75, 0.9375, 0.9961, 0.999]
    """

    sparsity: float = 0.999
    momentum: float = 0.9
    warm_up: int = 0

    layout = "elements"
    exchanges = ("all_gather",)
    kind = "own"
    has_momentum = True
    state: ClassVar = {"u": Kept(follows="loss scale"), "v": Kept(follows="loss scale")}

    def __post_init__(self) -> None:
        for name in ("sparsity", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"DGC: {name}={getattr(self, name)!r} is not in [0, 1)")
        check_whole(self, "warm_up", least=0)

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, worker: int, size: int) -> Tensor | None:
        return state.get("v")

    def sparsity_at(self, step: int) -> float:
        """Share of elements that is not sent in this step."""
        if self.warm_up == 0:
            return self.sparsity
        return min(self.sparsity, 1 - 0.25 ** min(step // self.warm_up + 1, 26))

    def compress(self, g: Tensor, ctx: StepContext) -> MessageGenerator:
        u, v = (ctx.state.get(key) for key in "uv")
        u = g.clone() if u is None else torch.add(g, u, alpha=self.momentum)
        v = u.clone() if v is None else v + u
        d = g.shape[1]
        k = max(1, d - round(self.sparsity_at(ctx.step) * d))
        i, _ = largest_indices(v, k, 1, ctx)
        mean, _ = yield from gather_sparse(v, i, v.view(-1)[i], ctx)
        u.view(-1).index_add_(0, i, u.view(-1)[i], alpha=-1)
        ctx.state.update(u=u, v=v)
        return mean, None


def check_count(method: str, k: float | int) -> None:
    """Raise ValueError if `k` is neither a share nor a number of elements."""
    share = isinstance(k, float) and 0 < k <= 1
    number = isinstance(k, int) and not isinstance(k, bool) and k >= 1
    if not (share or number):
        raise ValueError(
            f"{method}: k={k!r} is neither a share (a float in (0, 1]) nor a number of elements (an int ≥ 1)"
        )


def count(k: float | int, d: int) -> int:
    """Number of elements out of `d`: a share if `k` is a float, a number if it is an int; at least 1.

    >>> count(0.01, 1000), count(0.01, 10), count(50, 20)
    (10, 1, 20)
    """
    return min(d, max(1, math.ceil(k * d) if isinstance(k, float) else k))


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


@dataclass(frozen=True)
class SparseLoCo(Method):
    """Sends the 64 largest of every 64×64 elements, by sign and one of two magnitudes: 142 times fewer bytes than fp32.

    An element takes 2 bits and its place in the chunk 12. The magnitudes of a chunk take 3 bytes: the means of the chosen
    elements below and not below their average, weighted by magnitude. All workers send to all (all-gather). What was not
    sent, times `decay`, is the error feedback. Error feedback replaces outer momentum: use a plain outer `SGD`.

    All tensors are compressed, also small ones and vectors, which are cut into runs. Chunks of a matrix that 64 does not
    divide, and of thin ones, have other shapes of at most 4,096 elements, and send a proportional number.

    Args:
        k: Elements sent of each whole chunk. Lower → fewer bytes.
        chunk: Largest number of elements of a chunk, at most 65,536.
        decay: Factor of the error feedback from one average to the next, in (0, 1].

    >>> SparseLoCo().fits((256, 64)), SparseLoCo().fits((512,)), SparseLoCo().fits(())
    (True, True, False)
    """

    k: int = 64
    chunk: int = 4096
    decay: float = 0.95

    layout = "matrices"
    small_too = True
    exchanges = ("all_gather",)
    has_momentum = True

    def __post_init__(self) -> None:
        check_whole(self, "chunk", most=2**16)
        check_whole(self, "k", most=self.chunk)
        if not 0 < self.decay <= 1:
            raise ValueError(f"SparseLoCo: decay={self.decay!r} is not in (0, 1]")

    def fits(self, shape: tuple[int, ...]) -> bool:
        if not shape:
            return False
        m, n = shape[0], torch.Size(shape[1:]).numel()
        cut = chunks_of(m, n, self.chunk)
        return cut.many * (self._chosen(cut, m * n) * (2 + cut.bits) / 8 + 3) < 4 * m * n

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        b, m, n = M.shape
        cut = chunks_of(m, n, self.chunk)
        x = _cut(M, cut)
        i = x.abs().topk(self._chosen(cut, m * n), sorted=False).indices
        values = x.gather(1, i)
        message = _encoded(values, i, cut.bits)
        x.scatter_(1, i, values.sub_(_decoded(message, i.shape, x.dtype, cut.bits)[0]))
        everyone = yield Gather(message)
        mean = ctx.empty(x.shape, x.dtype).zero_()
        begin = torch.arange(0, x.numel(), x.shape[1], device=x.device)[:, None]
        for theirs in everyone:
            sent, place = _decoded(theirs, i.shape, x.dtype, cut.bits)
            mean.view(-1).index_add_(0, (place + begin).view(-1), sent.view(-1), alpha=1 / ctx.size)
        return _joined(mean, cut, b, m, n), _joined(x.mul_(self.decay), cut, b, m, n)

    def _chosen(self, cut: "Chunks", numel: int) -> int:
        """Number of elements sent of each chunk, so that `k` of `chunk` elements are sent."""
        return max(1, round(self.k * numel / (cut.many * self.chunk)))


class Chunks(NamedTuple):
    """How a matrix is cut: `down`×`across` chunks of `rows`×`columns` elements, the last ones padded."""

    down: int
    rows: int
    across: int
    columns: int

    @property
    def many(self) -> int:
        """Number of chunks."""
        return self.down * self.across

    @property
    def bits(self) -> int:
        """Bits of an element's place in its chunk."""
        return max(1, (self.rows * self.columns - 1).bit_length())


def chunks_of(m: int, n: int, most: int) -> Chunks:
    """Cut an m×n matrix into equal chunks of at most `most` elements, square ones where that is possible.

    >>> chunks_of(128, 256, 4096), chunks_of(10_000, 1, 4096)
    (Chunks(down=2, rows=64, across=4, columns=64), Chunks(down=3, rows=3334, across=1, columns=1))
    """
    _, rows = even(m, math.isqrt(most))
    across, columns = even(n, most // rows)
    down, rows = even(m, most // columns)
    return Chunks(down, rows, across, columns)


def _cut(M: Tensor, cut: Chunks) -> Tensor:
    """Cut M (b, m, n) into chunks: (b·many, rows·columns)."""
    down, rows, across, columns = cut
    wide = pad(M, (0, across * columns - M.shape[2], 0, down * rows - M.shape[1]))
    return wide.view(-1, down, rows, across, columns).transpose(2, 3).reshape(-1, rows * columns)


def _joined(x: Tensor, cut: Chunks, b: int, m: int, n: int) -> Tensor:
    """Undo `_cut`."""
    down, rows, across, columns = cut
    wide = x.view(b, down, across, rows, columns).transpose(2, 3).reshape(b, down * rows, across * columns)
    return wide[:, :m, :n]


def _encoded(values: Tensor, i: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Values (chunks, k) and their places: codes, places in `bits` bits, the higher level and the lower one's share of it."""
    large, low, high = two_levels(values.abs(), square=False)
    high = high.bfloat16()
    share = (low / high.to(low.dtype).clamp_min(torch.finfo(low.dtype).tiny) * 255).round_().clamp_(0, 255)
    code = (values < 0).to(torch.uint8).mul_(2).add_(large)
    fields = [(code, 2), (i & 255, min(bits, 8)), *([(i >> 8, bits - 8)] if bits > 8 else [])]
    gap = -i.numel() % 8
    packed = [pack(pad(field.to(torch.uint8).view(-1), (0, gap)), width) for field, width in fields]
    return *packed, high, share.to(torch.uint8)


def _decoded(
    message: tuple[Tensor, ...], shape: torch.Size, dtype: torch.dtype, bits: int
) -> tuple[Tensor, Tensor]:
    """Values and places that `_encoded` packed."""
    *packed, high, share = message
    widths = (2, min(bits, 8), bits - 8)
    code, *place = [
        unpack(field, width)[: shape.numel()].view(shape)
        for field, width in zip(packed, widths, strict=False)
    ]
    high = high.to(dtype)
    sent = signed_levels(code, high * share / 255, high, torch.empty(shape, dtype=dtype, device=code.device))
    return sent, sum((field.long() << 8 * j for j, field in enumerate(place)), torch.zeros_like(code).long())
