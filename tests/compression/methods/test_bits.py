"""Packed numbers, against plain Python integers."""

import pytest
import torch

from pufferfish.compression.methods.bits import pack, signs, unpack


def slow(values: list[int], bits: int) -> list[int]:
    """Fields of 4, 2 and 1 bits, the widest first; a byte's lowest field is its first number's."""
    packed = []
    for width in (4, 2, 1):
        if bits & width:
            bits -= width
            fields = [v >> bits & 2**width - 1 for v in values]
            per = 8 // width
            packed += [
                sum(f << width * j for j, f in enumerate(fields[at : at + per]))
                for at in range(0, len(fields), per)
            ]
    return packed


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_number_of_bits(bits: int) -> None:
    values = torch.randint(2**bits, (3, 2, 64), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = pack(values.clone(), bits)
    assert packed.shape == (3, 2, 8 * bits)
    if bits < 8:
        assert packed[2, 1].tolist() == slow(values[2, 1].tolist(), bits)
    assert torch.equal(unpack(packed, bits), values)


def test_bools_that_are_not_contiguous() -> None:
    rows = torch.rand(16, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(unpack(pack(rows.T, 1), 1).bool(), rows.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_signs_of_every_size(dtype: torch.dtype) -> None:
    plus = torch.rand(3, 2, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    size = torch.rand(3, 2, 1, dtype=dtype, generator=torch.Generator().manual_seed(1))
    packed = pack(plus.clone(), 1)
    out = torch.empty(3, 2, 40, dtype=dtype)
    assert signs(packed, out) is out
    assert torch.equal(out, torch.where(plus, 1, -1).to(dtype))
    assert torch.equal(signs(packed, out, size), torch.where(plus, size, -size))
