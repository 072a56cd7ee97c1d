"""Signum: signs of a momentum. EFSignSGD: signs with error feedback at the workers and at the owners of shards."""

import pytest
import torch

from driver import State, drive, normal
from pufferfish.compression import Signum


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_majority_of_the_signs_of_momentum(workers: int) -> None:
    states: list[State] = [{} for _ in range(workers)]
    m = [torch.zeros(2, 11) for _ in range(workers)]
    for step in range(4):
        gs = normal(2, 11, workers=workers, seed=step)
        mean = drive(Signum(momentum=0.6), gs, states, step).mean
        m = [0.6 * old + 0.4 * g for old, g in zip(m, gs, strict=True)]
        votes = sum(x.sign() for x in m)
        votes[votes == 0] = 1 if step % 2 == 0 else -1
        assert torch.equal(mean, votes.sign())
