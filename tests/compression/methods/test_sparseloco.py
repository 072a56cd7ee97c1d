"""SparseLoCo against a loop over its chunks, its bytes, and shapes of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import low_bits
from driver import drive, normal
from pufferfish.compression import Settings, Simulated, SparseLoCo


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
