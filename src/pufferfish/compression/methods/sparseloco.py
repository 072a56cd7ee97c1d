"""SparseLoCo (Sarfi et al., 2025): the largest elements of small chunks, in 2 bits each, for the averages of local steps."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..method import Gather, MessageGenerator, Method, StepContext, check_whole
from .bits import pack, unpack
from .int4 import signed_levels, two_levels
from .twostage import even


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

    matrix = True
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
