"""SparseLoCo against a loop over its chunks, its bytes, and shapes of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import low_bits
from driver import drive, normal
from pufferfish.compression import Settings, Simulated, SparseLoCo, check_compressor
from pufferfish.compression.methods.sparseloco import chunks_of


@pytest.mark.parametrize("method", [SparseLoCo(decay=1.0), SparseLoCo(k=3, chunk=64, decay=1.0)], ids=repr)
def test_properties(method: SparseLoCo) -> None:
    check_compressor(method, sizes=(1, 3), draws=20)


@pytest.mark.parametrize("shape", [(128, 192), (64, 64), (10_000,), (300,), (4096,)])
def test_equals_the_papers_loop(shape: tuple[int, ...]) -> None:
    """e = 0.95·e + Δ; the largest of each chunk are sent, e −= sent; all apply the mean."""
    workers = 2
    simulated = Simulated(Settings(SparseLoCo()), workers)
    errors = [np.zeros(shape) for _ in range(workers)]
    for step in range(3):
        given = normal(*shape, workers=workers, seed=step)
        if step:
            given[0].view(-1)[: given[0].numel() // 2] = 0
        mean = simulated.average([{"w": x} for x in given])[0]["w"]
        sent = []
        for worker, x in enumerate(given):
            e = 0.95 * errors[worker] + x.double().numpy()
            if shape == (10_000,):  # three runs of 3,334 instead of two of 4,096 and a short one
                runs = np.concatenate([e, np.zeros(2)]).reshape(3, -1)
                sent.append(np.concatenate([low_bits.sparse_chunk(run, 52) for run in runs])[:10_000])
            else:
                sent.append(low_bits.sparse_loco(e))
            errors[worker] = e - sent[-1]
        torch.testing.assert_close(mean.double(), torch.tensor(sum(sent) / workers), rtol=1e-4, atol=1e-5)
        for engine, e in zip(simulated.engines, errors, strict=True):
            kept = engine.state_dict()["own"]["w"]["error"].double()
            torch.testing.assert_close(kept, torch.tensor(0.95 * e), rtol=1e-4, atol=1e-5)


def test_bytes_of_a_round() -> None:
    """2 bits and a place of 12 bits for 64 elements, 3 bytes for two levels: 115 bytes instead of 16,384."""
    meter = drive(SparseLoCo(), normal(3, 128, 192, workers=2)).meter
    assert meter.collective_bytes["all_gather"] == 3 * 6 * (64 * 14 // 8 + 3)
    assert meter.messages == 1


def test_a_whole_model_is_sent_in_a_140th() -> None:
    """With the biases and norms, which are compressed too, and the flags of the agreement."""
    d = 320
    block = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    vectors = {"qkv.bias": (3 * d,), "up.bias": (4 * d,), **{f"v{i}": (d,) for i in range(6)}}
    shapes = {f"{i}.{name}": shape for i in range(2) for name, shape in (block | vectors).items()}
    shapes["embedding"] = (1365, d)  # which 64 does not divide
    stream = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=stream) for name, shape in shapes.items()}
    four = Simulated(Settings(SparseLoCo()), 4)
    four.average([model] * 4)
    dense = sum(x.nbytes for x in model.values())
    assert dense / sum(four.meter.collective_bytes.values()) > 140
    assert (
        2 * dense * 3 / 4 / (four.meter.wire_bytes / 30) > 2000
    )  # once in 30 updates, against a ring in fp32


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 90), max_size=3), min_size=1, max_size=3),
    st.sampled_from([(64, 4096), (1, 1), (5, 64), (7, 100), (1, 65536)]),
    st.integers(1, 3),
)
def test_any_shape_is_a_contraction_that_loses_nothing(
    shapes: list[list[int]], sizes: tuple[int, int], workers: int
) -> None:
    method = SparseLoCo(*sizes, decay=1.0)
    simulated = Simulated(Settings(method), workers)
    stream = torch.Generator().manual_seed(len(shapes))
    given = [
        {str(i): torch.randn(shape, generator=stream) for i, shape in enumerate(shapes)}
        for _ in range(workers)
    ]
    means = simulated.average(given)
    states = [engine.state_dict()["own"] for engine in simulated.engines]
    for name, x in given[0].items():
        assert all(torch.equal(mean[name], means[0][name]) for mean in means)
        errors = [own.get(name, {}).get("error", torch.zeros_like(x)) for own in states]
        target = sum(g[name] for g in given) / workers
        torch.testing.assert_close(means[0][name] + sum(errors) / workers, target)
        assert not x.numel() or errors[0].norm() < x.norm()
        compressed = any(name in b.names and b.method == method for b in simulated.engines[0].state.batches)
        assert compressed == (x.numel() > 0 and method.fits(tuple(x.shape)))
        assert compressed or torch.allclose(means[0][name], target)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 65536))
def test_chunks_cover_the_matrix(m: int, n: int, most: int) -> None:
    cut = chunks_of(m, n, most)
    assert cut.rows * cut.columns <= most
    assert 0 <= cut.down * cut.rows - m < cut.down
    assert 0 <= cut.across * cut.columns - n < cut.across
    assert 2**cut.bits >= cut.rows * cut.columns


def test_matrices_are_cut_into_squares() -> None:
    """An element far above its neighbours takes the place of one in its own square, and of no other."""
    (x,) = normal(1, 128, 128, workers=1)
    before = drive(SparseLoCo(), [x]).mean
    x[0, 10, 70] = 100.0
    after = drive(SparseLoCo(), [x]).mean
    changed = (before != after)[0].nonzero()
    assert len(changed)
    assert ((changed[:, 0] < 64) & (changed[:, 1] >= 64)).all()
    assert (after != 0).view(2, 64, 2, 64).sum((1, 3)).tolist() == [[64, 64], [64, 64]]


def test_few_elements_among_zeros_are_sent_whole() -> None:
    """Chosen zeros stay zero: gradients of embeddings are mostly zeros."""
    x = torch.zeros(1, 64, 128)
    x[0, 3, 5], x[0, 60, 2], x[0, 7, 7] = 0.3, -0.3, 0.3
    mean, (rest,), _ = drive(SparseLoCo(), [x])
    torch.testing.assert_close(mean, x, rtol=4e-3, atol=0)
    assert rest is not None
    assert torch.equal(rest != 0, x != 0) or not rest.any()


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e14])
def test_sizes_from_the_smallest_to_the_largest(scale: float) -> None:
    (x,) = normal(1, 64, 64, workers=1)
    mean, (rest,), _ = drive(SparseLoCo(), [x * scale])
    one = drive(SparseLoCo(), [x]).mean
    torch.testing.assert_close(mean / scale, one, rtol=1e-2, atol=0)
    assert rest is not None
    assert rest.norm() <= (x * scale).norm()


@pytest.mark.parametrize(
    "wrong",
    [{"k": 0}, {"k": 5000}, {"k": 1.5}, {"chunk": 0}, {"chunk": 2**16 + 1}, {"decay": 0.0}, {"decay": 1.1}],
)
def test_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"SparseLoCo: {next(iter(wrong))}="):
        SparseLoCo(**wrong)  # type: ignore[arg-type]
