"""Small integers packed into bytes: 1 bit per element for signs, as many as needed for levels."""

from functools import lru_cache

import torch
from torch import Tensor

#: Bits of a field → dtype with one byte for each field of a packed byte.
_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
#: A word times this has the fields of all its bytes side by side in its top byte, without carries.
_TOGETHER = {1: 0x0102040810204080, 2: 0x01041040, 4: 0x0110}


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
