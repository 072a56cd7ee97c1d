"""The code of `Changed`, against the values themselves and a count of its parts by loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pufferfish.compression.methods.changed import as_integers, decode, encode, sizes

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8)


def pair(n: int, rate: float, large: float, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Any bits at all, of which a share changes: to a neighbour, or a share of those to anything."""
    generator = torch.Generator().manual_seed(seed)
    old = as_integers(
        torch.randint(256, (n * dtype.itemsize,), generator=generator).to(torch.uint8).view(dtype)
    )
    anything = as_integers(
        torch.randint(256, (n * dtype.itemsize,), generator=generator).to(torch.uint8).view(dtype)
    )
    step = torch.randint(-3, 4, (n,), generator=generator).to(old.dtype)
    new = torch.where(torch.rand(n, generator=generator) < large, anything, old + step)
    return torch.where(torch.rand(n, generator=generator) < rate, new, old), old


def slow_sizes(new: list[int], old: list[int], itemsize: int) -> int:
    """Bytes of the shortest of the four forms, by their description."""
    where = [i for i, (a, b) in enumerate(zip(new, old, strict=True)) if a != b]
    if not where:
        return 0
    words = -(-len(new) // 128) * 8
    masks = min(2 * words, 2 * len({i // 16 for i in where}) + words // 8)
    found = []
    for bits in (2, 4):
        span = 1 << 8 * itemsize
        wrapped = [(new[i] - old[i] + span // 2) % span - span // 2 for i in where]
        escapes = sum(not -(1 << bits - 1) <= d < 1 << bits - 1 for d in wrapped)
        found.append(
            (escapes * itemsize * 8 + bits * len(where), escapes * itemsize + -(-len(where) // 8) * bits)
        )
    return min(masks + min(found)[1], len(new) * itemsize)


@given(
    n=st.integers(1, 700),
    rate=st.sampled_from([0.0, 0.003, 0.05, 0.5, 1.0]),
    large=st.sampled_from([0.0, 0.1, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_the_new_values_come_back(n: int, rate: float, large: float, dtype: torch.dtype, seed: int) -> None:
    new, old = pair(n, rate, large, dtype, seed)
    given_new, given_old = new.clone(), old.clone()
    counts, data = encode(new, old)
    assert len(data) == sum(sizes(counts, old)) == slow_sizes(new.tolist(), old.tolist(), old.itemsize)
    assert torch.equal(new, given_new)
    assert torch.equal(old, given_old)
    padded = torch.cat([data, torch.full((7,), 255, dtype=torch.uint8)])  # what is behind it does not matter
    decode(counts, padded, old)
    assert torch.equal(new, old)


def test_bits_are_compared() -> None:
    """NaN is equal to itself, whatever its payload; −0.0 differs from 0.0."""
    old = torch.tensor([0.0, float("nan"), 1.0, float("inf")] * 100).bfloat16()
    new = old.clone()
    assert encode(as_integers(new), as_integers(old))[0] == (0, 0, 0, 0)
    new[0], new[1] = -0.0, torch.tensor(0x7FC1, dtype=torch.int16).view(torch.bfloat16)
    counts, data = encode(as_integers(new), as_integers(old))
    assert counts[2] == 2
    decode(counts, data, as_integers(old))
    assert torch.equal(as_integers(new), as_integers(old))


def test_few_bits_at_fine_tuning_rates() -> None:
    """Bits an element of bf16 weights, 1.5 % and 33 % of which change, most by one unit in the last place."""
    generator = torch.Generator().manual_seed(0)
    old = as_integers(torch.randn(200_000, generator=generator).bfloat16())
    for share, one, most in ((0.015, 0.9, 0.36), (0.33, 0.74, 3.2)):
        step = torch.where(torch.rand(len(old), generator=generator) < one, 1, 5).to(old.dtype)
        new = torch.where(torch.rand(len(old), generator=generator) < share, old + step, old)
        assert 8 * len(encode(new, old)[1]) / len(old) < most
