"""Quantizers: a few bits for each element, in blocks that share a scale, rounded to the nearest level or at random.

LoCo is Xie et al., 2024; QSGD is Alistarh et al., 2017; TernGrad is Wen et al., 2017.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ..method import Gather, Kept, MessageGenerator, Method, Scatter, StepContext, check_whole

#: Value of every byte.
_FP8 = torch.arange(256, device="cpu").to(torch.uint8).view(torch.float8_e4m3fn).float()
#: Bits of a field → dtype with one byte for each field of a packed byte.
_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
#: A word times this has the fields of all its bytes side by side in its top byte, without carries.
_TOGETHER = {1: 0x0102040810204080, 2: 0x01041040, 4: 0x0110}


@dataclass(frozen=True)
class TwoStage(Method):
    """Base class of quantizers. Subclasses define `encode` and `decode`, between numbers and messages.

    Shards of every tensor are sent to their owners (all-to-all), and their means to all workers (all-gather). For contractions, the
    error of the first quantization is each worker's error feedback, that of the second is kept at the owner. With
    exchange="all_gather" everything is sent to all workers at once, and each computes the mean itself: one message and one
    quantization, but bytes that grow with the number of workers.
    """

    exchanges = ("all_to_all", "all_gather")
    state: ClassVar = {"owner": Kept("divided", follows="units")}

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


def _times(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply each block of x (…, s) by its scale (…, blocks), in place."""
    x.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1))
    return x


@dataclass(frozen=True)
class Blocks(TwoStage):
    """Common base of methods that cut a shard into blocks of equal sizes."""

    block: int = 256

    multiple: ClassVar[int] = 1  # what the size of a block is a multiple of
    largest: ClassVar[int]  # value of a block's largest element

    def __post_init__(self) -> None:
        check_whole(self, "block", multiple=self.multiple)

    def shard(self, d: int, shards: int) -> int:
        many, size = even(-(-d // shards), self.block, self.multiple)
        return many * size

    def cut(self, x: Tensor) -> Tensor:
        """x (…, s) as blocks (…, blocks, size)."""
        return x.view(*x.shape[:-1], *even(x.shape[-1], self.block, self.multiple))

    def scaled(self, x: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """x divided by a scale for each block, so that its largest element becomes `largest`; and the scales."""
        v = self.cut(x)
        size = torch.maximum(v.amax(-1, keepdim=True), -v.amin(-1, keepdim=True))
        scale = (size / self.largest).clamp_min(torch.finfo(x.dtype).tiny)
        return torch.div(v, scale, out=spare.view(v.shape)).view(x.shape), scale.squeeze(-1)


@dataclass(frozen=True)
class _Bytes(Blocks):
    number: ClassVar[torch.dtype]

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        q, scale = self.scaled(x, spare)
        if not self.number.is_floating_point:
            q.round_()
        return ctx.empty(x.shape, self.number).copy_(q).view(torch.uint8), scale

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        q, scale = sent
        if self.number.is_floating_point and q.device.type == "cpu":  # torch converts fp8 slowly there
            torch.index_select(_FP8.to(out.dtype), 0, q.reshape(-1).int(), out=out.view(-1))
        else:
            out.copy_(q.view(self.number))
        return _times(out, scale)


@dataclass(frozen=True)
class BlockInt8(_Bytes):
    """Rounds each block to integers from −127 to 127, times a scale: 3.94 times fewer bytes than fp32.

    Shards are averaged by their owners (all-to-all), rounded again and sent to all (all-gather). The error of the first
    rounding is each worker's error feedback, that of the second is kept at the owner.

    Args:
        block: Largest number of elements that share a scale of 4 bytes. Higher → fewer bytes, coarser.

    >>> BlockInt8()
    BlockInt8(block=256)
    """

    number = torch.int8
    largest = 127


@dataclass(frozen=True)
class BlockFP8(_Bytes):
    """`BlockInt8` in fp8 (e4m3): finer for a block's small elements, coarser for its large ones.

    Args:
        block: Largest number of elements that share a scale of 4 bytes. Higher → fewer bytes, coarser.

    >>> BlockFP8(block=128)
    BlockFP8(block=128)
    """

    number = torch.float8_e4m3fn
    largest = 448


@dataclass(frozen=True)
class Int4(Blocks):
    """Rounds each block to integers from −7 to 7, times a scale: 7.76 times fewer bytes than fp32.

    Shards are averaged by their owners (all-to-all), rounded again and sent to all (all-gather). The error of the first
    rounding is each worker's error feedback, that of the second is kept at the owner.

    Args:
        block: Largest number of elements that share a scale of 4 bytes, a multiple of 8. Higher → fewer bytes, coarser.

    >>> Int4()
    Int4(block=256)
    """

    multiple = 8  # elements are packed into bytes
    largest = 7

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        q, scale = self.scaled(x, spare)
        return pack(ctx.empty(x.shape, torch.uint8).copy_(q.round_().add_(7)), 4), scale

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        packed, scale = sent
        return _times(out.copy_(unpack(packed, 4).sub_(7).view(torch.int8)), scale)


@dataclass(frozen=True)
class Int2(Blocks):
    """Sends a sign and one of two magnitudes for each element: 15.1 times fewer bytes than fp32.

    The magnitudes of a block are the means of those below its root mean square and of the others, so that the error is never
    longer than the block. A zero counts as +. Shards are averaged by their owners and encoded again, as in `Int4`.

    Args:
        block: Largest number of elements that share two magnitudes of 2 bytes, a multiple of 8. Higher → fewer bytes,
            coarser.

    >>> Int2(block=64)
    Int2(block=64)
    """

    multiple = 8

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        v = self.cut(x)
        large, low, high = two_levels(torch.abs(v, out=spare.view(v.shape)), square=True)
        code = torch.lt(v, 0, out=ctx.empty(v.shape, torch.bool)).view(torch.uint8).mul_(2).add_(large)
        return pack(code.view(x.shape), 2), torch.cat([low, high], -1).bfloat16()

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        packed, levels = sent
        low, high = levels.to(out.dtype).split(1, -1)
        code = unpack(packed, 2).unflatten(-1, (levels.shape[-2], -1))
        signed_levels(code, low, high, out.view(code.shape))
        return out


@dataclass(frozen=True)
class LoCo(Int4):
    """`Int4` with an error feedback of one byte per element: h = g + e is sent, and e = β·e + (1 − β)·(h − sent).

    Because e + (1 − β)·(g − sent) is the same, e is 1 − β times the sum of all that was not sent: error feedback that
    responds slowly. e is rounded to 8 bits in blocks. The owners of shards keep the error of their own rounding in fp32.

    Args:
        block: Largest number of elements that share a scale of 4 bytes, a multiple of 8. Higher → fewer bytes, coarser.
        beta: Share of the old error in the new one, in [0, 1). 0: error feedback at full size.
        reset: Steps after which e becomes zero, so that errors of old gradients do not stay.

    >>> LoCo()
    LoCo(block=256, beta=0.8, reset=1024)
    """

    beta: float = 0.8
    reset: int = 1024

    kind = "own"
    state: ClassVar = {**TwoStage.state, "e": Kept(), "scale": Kept(follows="units")}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < 1:
            raise ValueError(f"LoCo: beta={self.beta!r} is not in [0, 1)")
        check_whole(self, "reset")

    def keeps_errors(self, ctx: StepContext) -> bool:
        return True

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, worker: int, size: int) -> Tensor | None:
        parts = [super().unsent(state, shape, worker, size)]
        if "e" in state and "scale" in state:
            e = _decoded(state["e"].reshape(1, -1), state["scale"].reshape(1, -1), self.block)
            parts.append(e.view(shape) / (1 - self.beta))
        known = [x for x in parts if x is not None]
        return sum(known[1:], known[0]) if known else None

    def compress(self, g: Tensor, ctx: StepContext) -> MessageGenerator:
        e: Tensor | None = None
        if "e" in ctx.state and "scale" in ctx.state:
            e = _decoded(ctx.state["e"], ctx.state["scale"], self.block)
            g += e
        mean, rest = yield from super().compress(g, ctx)
        assert rest is not None
        rest *= 1 - self.beta
        if e is not None:
            rest.add_(e, alpha=self.beta)
        if (ctx.step + 1) % self.reset == 0:
            rest.zero_()
        ctx.state["e"], ctx.state["scale"] = _encoded(rest, self.block)
        return mean, None


def _encoded(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Round x (b, d) to int8 in blocks: (b, d), and a scale for each block, (b, blocks)."""
    v = _blocks(x, block)
    scale = (v.abs().amax(2, keepdim=True) / 127).clamp_min(torch.finfo(x.dtype).tiny)
    codes = (v / scale).round_().to(torch.int8)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scale.squeeze(2)


def _decoded(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    return (_blocks(codes, block) * scale.unsqueeze(2)).flatten(1)[:, : codes.shape[1]]


def _blocks(x: Tensor, block: int) -> Tensor:
    """Cut x (b, d) into blocks of equal sizes: (b, blocks, size)."""
    many, size = even(x.shape[1], block)
    return torch.nn.functional.pad(x, (0, many * size - x.shape[1])).view(len(x), many, size)


def two_levels(size: Tensor, *, square: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split magnitudes (…, n): which are large, the mean of the small and that of the large, (…, 1) each. Overwrites `size`.

    Large are those not below the root mean square, or, if not `square`, below the mean weighted by the magnitudes.

    >>> two_levels(torch.tensor([1.0, 3.0, 0.0, 5.0]), square=False)
    (tensor([False, False, False,  True]), tensor([1.3333]), tensor([5.]))
    """
    n = size.shape[-1]
    norm = torch.linalg.vector_norm(size, dim=-1, keepdim=True)
    total = size.sum(-1, keepdim=True)
    split = norm * n**-0.5 if square else norm * (norm / total.clamp_min(torch.finfo(size.dtype).tiny))
    large = size >= torch.minimum(split, size.amax(-1, keepdim=True))  # never none, however it was rounded
    chosen = large.to(size.dtype)  # sums and products of bools are slow
    many = chosen.sum(-1, keepdim=True)
    high = chosen.mul_(size).sum(-1, keepdim=True) / many
    low = size.sub_(chosen).sum(-1, keepdim=True) / (n - many).clamp_min(1)
    return large, low, high


def signed_levels(code: Tensor, low: Tensor, high: Tensor, out: Tensor) -> Tensor:
    """Decode 0, 1, 2, 3 to low, high, −low, −high.

    >>> signed_levels(torch.arange(4).to(torch.uint8), torch.tensor(1.0), torch.tensor(3.0), torch.empty(4))
    tensor([ 1.,  3., -1., -3.])
    """
    out.copy_(code & 1).mul_(high - low).add_(low)
    return out.mul_(1 - (code & 2).view(torch.int8))


@dataclass(frozen=True)
class QSGD(TwoStage):
    """Quantizes buckets v to ‖v‖₂ · l/s, where s·vᵢ/‖v‖₂ is rounded up to l with the probability of its fraction, else down.

    A message has ⌈log₂(2s + 1)⌉ bits per element and one norm per bucket. Shards are summed by their owners, which
    quantize the mean again before they send it.

    Args:
        levels: s; lower → fewer bits, more noise. 7 takes 4 bits.
        bucket: Largest number of elements that share a norm, a multiple of 8; higher → fewer bytes, more noise. The
            buckets of a shard have equal sizes.

    >>> QSGD().bits, QSGD(levels=1).bits, QSGD(levels=127).bits
    (4, 2, 8)
    """

    levels: int = 7
    bucket: int = 512

    kind = "unbiased"
    state: ClassVar = {}

    def __post_init__(self) -> None:
        check_whole(self, "levels", most=127)
        check_whole(self, "bucket", multiple=8)

    @property
    def bits(self) -> int:
        """Bits per element."""
        return (2 * self.levels).bit_length()

    def shard(self, d: int, shards: int) -> int:
        many, size = even(-(-d // shards), self.bucket, multiple=8)
        return many * size

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        v = x.unflatten(-1, even(x.shape[-1], self.bucket, multiple=8))
        norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        level = dithered(v, self.levels / norm.clamp_min(1e-30), self.levels, spare.view(v.shape), ctx)
        return pack(level.flatten(-2), self.bits), norm.squeeze(-1)

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        packed, norm = sent
        return _times(
            out.copy_(unpack(packed, self.bits).sub_(self.levels).view(torch.int8)), norm / self.levels
        )


@dataclass(frozen=True)
class TernGrad(Method):
    """Sends s·sgn(gᵢ)·bᵢ with bᵢ = 1 with probability `|gᵢ|/s`, where s is the largest `|gᵢ|` of the tensor on any worker.

    With one s for all workers, sums are integers from −W to W. Owners of shards add 2-bit numbers and send the exact
    sums back in ⌈log₂(2W + 1)⌉ bits: 2 + 5 bits per element for 8 workers, where an all-reduce of bytes, limited to 127
    workers, would send 8 + 8.

    Args:
        clip: Elements are clipped at this multiple of their tensor's σ first, which reduces s and the noise. The clipped part
            is lost. None: no clipping, unbiased. σ is taken about zero: about the mean, a tensor of equal elements would
            become zero.

    >>> TernGrad(clip=None).kind
    'unbiased'
    """

    clip: float | None = 2.5

    exchanges = ("all_to_all",)

    @property
    def kind(self) -> str:
        return "unbiased" if self.clip is None else "clipped"

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"TernGrad: clip={self.clip!r} is neither None nor a finite number > 0")

    def compress(self, g: Tensor, ctx: StepContext) -> MessageGenerator:
        d = g.shape[1]
        if self.clip is not None:
            bound = self.clip * d**-0.5 * torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g.clamp_(-bound, bound)
        sizes = yield Gather((torch.maximum(g.amax(1, keepdim=True), -g.amin(1, keepdim=True)),))
        s = torch.stack([size for (size,) in sizes]).amax(0)
        spare = ctx.empty(g.shape, g.dtype)
        ternary = dithered(g, 1 / s.clamp_min(1e-30), 1, spare, ctx)
        received = yield Scatter(tuple((pack(t, 2),) for t in ctx.shards(ternary, multiple=8)))
        bits = (2 * ctx.size).bit_length()
        total = unpack(received[0][0], 2).to(torch.uint8 if bits <= 8 else torch.int16)  # of 0 to 2
        for (theirs,) in received[1:]:
            total += unpack(theirs, 2)
        totals = yield Gather((pack(total, bits) if bits <= 8 else total,))
        sums = ctx.whole([unpack(t, bits) if bits <= 8 else t for (t,) in totals], d)
        return spare.copy_(sums).sub_(ctx.size).mul_(s / ctx.size), None


def dithered(x: Tensor, scale: Tensor, most: int, spare: Tensor, ctx: StepContext) -> Tensor:
    """Round x·scale, in [−most, most], up with the probability of its fraction, else down; add `most`, as uint8."""
    level = spare.uniform_(most, most + 1, generator=ctx.own_rng).addcmul_(x, scale)
    return ctx.empty(x.shape, torch.uint8).copy_(level).clamp_(max=2 * most)


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack (…, n) bytes or bools below 2^bits, n a multiple of 8, into (…, bits·n/8) bytes. Overwrites `values`.

    Numbers are cut into fields of 4, 2 and 1 bits; fields of one width are stored together, the widest first.

    >>> pack(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1], dtype=torch.uint8), 1)
    tensor([129], dtype=torch.uint8)
    """
    values = values.contiguous().view(torch.uint8)
    if bits == 8:
        return values
    packed, rest = [], values
    for width in _fields(bits):
        bits -= width
        field, rest = (rest >> bits, rest & (1 << bits) - 1) if bits else (rest, rest)
        words = field.view(_WORDS[width]).mul_(_TOGETHER[width])
        packed.append(words.view(torch.uint8)[..., 8 // width - 1 :: 8 // width])
    return torch.cat(packed, -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`; returns a new uint8 tensor.

    >>> unpack(pack(torch.arange(8, dtype=torch.uint8), 3), 3)
    tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    """
    if bits == 8:
        return packed.clone()
    values: Tensor | None = None
    n = packed.shape[-1] // bits
    for width, part in zip(_fields(bits), packed.split([f * n for f in _fields(bits)], -1), strict=True):
        table = _table(width, packed.device)
        words = table.index_select(0, part.reshape(-1).int()).view(part.shape)
        field = words.view(torch.uint8)
        values = field if values is None else (values << width).bitwise_or_(field)
    assert values is not None
    return values


def signs(packed: Tensor, out: Tensor, size: Tensor | None = None) -> Tensor:
    """Unpack bits to floats: 1, or the row's `size` (…, 1), where a bit is set, else its negative.

    >>> signs(torch.tensor([[3], [1]], dtype=torch.uint8), torch.empty(2, 8), torch.tensor([[2.0], [1.0]]))
    tensor([[ 2.,  2., -2., -2., -2., -2., -2., -2.],
            [ 1., -1., -1., -1., -1., -1., -1., -1.]])
    """
    bits = _table(1, packed.device).view(torch.uint8).view(256, 8)
    table = bits.to(out.dtype).mul_(2).sub_(1)
    row = packed.int()
    if size is not None:  # one table per row
        table = (table * size.reshape(-1, 1, 1)).view(-1, 8)
        row += 256 * torch.arange(size.numel(), device=packed.device, dtype=torch.int32).view(size.shape)
    torch.index_select(table, 0, row.reshape(-1), out=out.view(-1, 8))
    return out


def _fields(bits: int) -> list[int]:
    return [width for width in (4, 2, 1) if bits & width]


@lru_cache
def _table(width: int, device: torch.device) -> Tensor:
    """The fields of every byte, as one word each."""
    fields = torch.arange(256)[:, None] >> width * torch.arange(8 // width) & (1 << width) - 1
    return fields.to(torch.uint8).view(_WORDS[width]).squeeze(1).to(device)
