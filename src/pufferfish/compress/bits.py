"""Small numbers packed into bytes: 1 bit an element for signs, as many as it takes for levels."""

from __future__ import annotations

import torch
from torch import Tensor

# Eight elements at once, as the bytes of one 64-bit word; wherever a sum could carry, only one bit is set.
_TOGETHER = 0x0102040810204080  # times bytes of 0 or 1: byte i becomes bit 56 + i
_EVERYWHERE = 0x0101010101010101  # times a byte: the same byte in all eight places
_ONE_EACH = 0x8040201008040201 - 2**64  # bit i of byte i


def pack(values: Tensor, bits: int) -> Tensor:
    """(…, n) numbers below 2^bits, n a multiple of 8, as (…, bits·n/8) bytes: all lowest bits first.

    >>> pack(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1]), 1)
    tensor([129], dtype=torch.uint8)
    """
    v = values.to(torch.uint8).contiguous()
    if bits == 8:
        return v
    planes = [((v >> bit) & 1).view(torch.int64) for bit in range(bits)]
    return torch.cat([((plane * _TOGETHER) >> 56).to(torch.uint8) for plane in planes], -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """What `pack` was given, as uint8.

    >>> unpack(pack(torch.arange(8), 3), 3)
    tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    """
    if bits == 8:
        return packed
    planes = packed.unflatten(-1, (bits, -1)).unbind(-2)
    values = _spread(planes[0])
    for bit, plane in enumerate(planes[1:], 1):
        values |= _spread(plane) << bit
    return values


def _spread(plane: Tensor) -> Tensor:
    """Every bit as a byte of 0 or 1."""
    words = (plane.long() * _EVERYWHERE) & _ONE_EACH
    return (words.view(torch.uint8) != 0).view(torch.uint8)
