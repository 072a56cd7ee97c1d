"""Int4 and Int2 against loops over their blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import low_bits
from driver import State, drive, normal
from pufferfish.compression import Int2, Int4, Method, Settings, Simulated, check_compressor

BOTH = [(Int4(block=8), low_bits.int4), (Int2(block=8), low_bits.int2)]


def slow(x: Tensor, reference: Callable[[np.ndarray], np.ndarray], block: int, width: int) -> Tensor:
    """Encode and decode every block of x, padded with zeros to `width`."""
    wide = np.zeros((len(x), width))
    wide[:, : x.shape[1]] = x.double().numpy()
    for row in wide:
        for a in range(0, width, block):
            if row[a : a + block].any():
                row[a : a + block] = reference(row[a : a + block])
    return torch.tensor(wide[:, : x.shape[1]], dtype=torch.float32)


@pytest.mark.parametrize("method", [Int4(), Int2(block=64)], ids=repr)
def test_properties(method: Method) -> None:
    check_compressor(method, sizes=(1, 3), draws=20)


@pytest.mark.parametrize(("method", "reference"), BOTH, ids=["int4", "int2"])
def test_both_roundings_equal_the_loop(method: Method, reference: Callable[[np.ndarray], np.ndarray]) -> None:
    """27 elements for two owners are two blocks of 8 for each: 32 with the padding."""
    workers, d = 2, 27
    states: list[State] = [{}, {}]
    owner = torch.zeros(2, d)
    for step in range(3):
        xs = normal(2, d, workers=workers, seed=step)
        xs[0][1, :16] = 0
        mean, rests, meter = drive(method, xs, states, step)
        for x, rest in zip(xs, rests, strict=True):
            torch.testing.assert_close(rest, x - slow(x, reference, 8, 32))
        total = sum(slow(x, reference, 8, 32) for x in xs) / workers + owner
        back = slow(total, reference, 8, 32)
        owner = total - back
        torch.testing.assert_close(mean, back)
        torch.testing.assert_close(torch.cat([s["owner"] for s in states], 1)[:, :d], owner)
    each = 16 // 2 + 2 * 4 if isinstance(method, Int4) else 16 // 4 + 2 * 4  # of a shard, with its scales
    found = meter.collective_bytes
    assert (found["all_gather"], found["all_to_all"]) == (2 * each, 2 * 2 * each)


@pytest.mark.parametrize(("method", "bits"), [(Int4(), 4), (Int2(), 2)], ids=["int4", "int2"])
@pytest.mark.parametrize("workers", [2, 4])
def test_bits_on_the_wire(method: Method, bits: int, workers: int) -> None:
    sent = drive(method, normal(1, 4096, workers=workers)).meter.wire_bytes
    ring = 2 * 4 * 4096 * (workers - 1) / workers
    assert ring / sent == pytest.approx(32 / (bits + 32 / 256))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([Int4, Int2]),
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=3),
    st.sampled_from([8, 16, 256]),
    st.integers(1, 3),
    st.floats(-18, 14),
)
def test_any_shape_is_a_contraction_that_loses_nothing(
    kind: type[Method], shapes: list[list[int]], block: int, workers: int, size: float
) -> None:
    simulated = Simulated(Settings(kind(block), smallest=0), workers)  # type: ignore[call-arg]
    stream = torch.Generator().manual_seed(len(shapes))
    given = [
        {str(i): torch.randn(shape, generator=stream) * 10**size for i, shape in enumerate(shapes)}
        for _ in range(workers)
    ]
    means = simulated.average(given)
    states = [engine.state_dict()["own"] for engine in simulated.engines]
    for name, x in given[0].items():
        target = sum(g[name] for g in given) / workers
        assert means[0][name].shape == x.shape
        if x.numel() == 0:
            continue
        held = sum(own[name]["error"] for own in states) / workers
        owner = torch.cat([own[name]["owner"].flatten() for own in states])[: x.numel()].view(x.shape)
        torch.testing.assert_close(means[0][name] + held + owner, target, rtol=1e-4, atol=1e-6 * 10**size)
        assert states[0][name]["error"].norm() <= x.norm() * 1.0001
        assert all(torch.equal(mean[name], means[0][name]) for mean in means)


@pytest.mark.parametrize("method", [Int4(block=8), Int2(block=8)], ids=repr)
def test_sizes_from_the_smallest_to_the_largest(method: Method) -> None:
    x = torch.tensor([[1e15, -1.0, 1e-3, 0.0, 0, 0, 0, 0, 1e-38, 1e-42, 0.0, -1e-40, 0, 0, 0, 0]])
    mean, (rest,), _ = drive(method, [x])
    assert mean.isfinite().all()
    assert mean[0, 0] == pytest.approx(1e15, rel=4e-3)
    assert rest is not None
    assert rest.norm() <= x.norm()


def test_one_magnitude_is_sent_whole() -> None:
    """The root mean square of equal numbers may be rounded to more than they are."""
    for value in (0.1, 0.3, 0.7, 1 / 3, 1e-20):
        x = torch.tensor([[value, -value] * 12])
        torch.testing.assert_close(drive(Int2(block=8), [x]).mean, x, rtol=4e-3, atol=0)


@pytest.mark.parametrize("block", [0, 4, 12, 8.0, True])
def test_settings(block: int) -> None:
    for kind in (Int4, Int2):
        with pytest.raises(ValueError, match=f"{kind.__name__}: block="):
            kind(block=block)
