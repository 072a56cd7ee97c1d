"""`Changed`: parameters gathered without loss, as the difference to what was gathered last, and its code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .quantized import pack, unpack

#: Integers of each size, as which values are compared bit by bit: NaN is equal to itself, and −0.0 is not 0.0.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements of a shard that share one word of the mask.
_WORD = 16


@dataclass(frozen=True)
class Changed:
    """Sends what changed since the last gather of a sharded model's parameters: the same bits with fewer bytes.

    At fine-tuning rates few bf16 weights change in a step, most of them to a neighbouring number. Every worker keeps what was
    gathered last, which takes as much memory as the unsharded parameters in the dtype of the gather. It is for
    `compress(parameters=)`.

    >>> Changed()
    Changed()
    """


#: Code bits of a changed element, words of the mask, changed elements, and elements sent as they are ("escapes").
Counts = Sequence[int]


def as_integers(x: Tensor) -> Tensor:
    """The bits of x as integers of the same size, in the same memory."""
    return x.view(_INTEGERS[x.itemsize])


def encode(new: Tensor, old: Tensor) -> tuple[Counts, Tensor]:
    """Encode what changed from `old` to `new`, flat integers of equal size, as bytes.

    A mask says which elements changed; of its 16-bit words only those that are not zero are sent, with a mask of their own,
    if that is shorter. For each changed element there is the difference in 2 or 4 bits, or 0 for an escape: the new
    value is sent. If that is no shorter than `new`, all elements are escapes, without a mask.

    >>> old = torch.zeros(1000, dtype=torch.int16)
    >>> new = old.clone()
    >>> new[3], new[500] = 1, 77
    >>> counts, data = encode(new, old)
    >>> counts, len(data)
    ((2, 2, 2, 1), 16)
    """
    n = len(new)
    mask = torch.zeros(_WORD * _words(n), dtype=torch.bool, device=new.device)
    torch.ne(new, old, out=mask[:n])
    at = _places(mask)
    if not len(at):
        return (0, 0, 0, 0), new.new_empty(0, dtype=torch.uint8)
    values = new.index_select(0, at)
    difference = values - old.index_select(0, at)
    escaped, bits = min(
        ((_beyond(difference, bits), bits) for bits in (2, 4)),
        key=lambda choice: 8 * new.itemsize * int(choice[0].sum()) + choice[1] * len(at),
    )
    codes = torch.zeros(8 * -(-len(at) // 8), dtype=torch.uint8, device=new.device)
    codes[: len(at)] = difference.bitwise_and_((1 << bits) - 1).masked_fill_(escaped, 0)
    words = pack(mask, 1).view(torch.int16)
    kept = words != 0
    some = words.index_select(0, _places(kept))
    escapes = values.index_select(0, _places(escaped))
    two_levels = some.nbytes + len(words) // 8 < words.nbytes
    counts = (bits, len(some) if two_levels else len(words), len(at), len(escapes))
    if sum(sizes(counts, new)) >= new.nbytes:
        return (0, 0, n, n), new.view(torch.uint8)
    levels = [some.view(torch.uint8), pack(kept, 1)] if two_levels else [words.view(torch.uint8)]
    return counts, torch.cat([escapes.view(torch.uint8), *levels, pack(codes, bits)])


def decode(counts: Counts, data: Tensor, values: Tensor) -> None:
    """Change `values` in place from the old to the new ones; bytes of `data` behind the code do not matter."""
    bits, _, changed, many = counts
    escapes, words, top, codes = data[: sum(sizes(counts, values))].split(sizes(counts, values))
    if many == len(values):
        values.copy_(escapes.view(values.dtype))
    elif changed:
        at = _places(unpack(words, 1).view(torch.bool))
        if len(top):
            sent = at >> 4  # of the words that were sent, which one this is in
            word = _places(unpack(top, 1).view(torch.bool)).index_select(0, sent)
            at += word.sub_(sent).mul_(_WORD)
        difference = unpack(codes, bits)[:changed].view(torch.int8)
        signed = (difference << 8 - bits) >> 8 - bits  # the shift to the right repeats the sign
        new = values.index_select(0, at) + signed
        new.scatter_(0, _places(difference == 0), escapes.view(values.dtype))
        values.scatter_(0, at, new)


def sizes(counts: Counts, values: Tensor) -> list[int]:
    """Bytes of the four parts of a message: escapes, words, the mask of words, and codes.

    >>> sizes((2, 2, 2, 1), torch.zeros(1000, dtype=torch.int16))
    [2, 4, 8, 2]
    """
    bits, words, changed, escapes = counts
    all_words = _words(len(values))
    top = all_words // 8 if 0 < words < all_words else 0
    return [escapes * values.itemsize, words * _WORD // 8, top, -(-changed // 8) * bits]


def _places(mask: Tensor) -> Tensor:
    """Where a flat mask is true. On a CPU, NumPy finds that up to ten times as fast, because it takes no branches."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def _words(n: int) -> int:
    """Words of the mask of n elements, a multiple of 8."""
    return -(-n // (8 * _WORD)) * 8


def _beyond(difference: Tensor, bits: int) -> Tensor:
    """Which differences do not fit into a signed number of so many bits."""
    half = 1 << bits - 1
    return (difference < -half) | (difference >= half)
