"""What tests against slow references need: one step of a method on simulated workers, random tensors, means."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pufferfish.compression import Method, Simulated, Turn
from pufferfish.compression.lockstep import Lockstep
from pufferfish.compression.meter import Meter

State = dict[str, Tensor]


class Step(NamedTuple):
    mean: Tensor
    rests: list[Tensor | None]
    meter: Meter


def drive(
    method: Method,
    xs: list[Tensor],
    states: list[State] | None = None,
    step: int = 0,
    seed: int = 0,
    exchange: str | None = None,
) -> Step:
    """`xs` are the workers' (b, d) or (b, m, n). `states` are theirs, replaced by what they keep."""
    states = [{} for _ in xs] if states is None else states
    names = tuple(f"t{i}" for i in range(len(xs[0])))
    turns = [
        Turn(r, len(xs), step, names, seed=seed, exchange=exchange, state=dict(state))
        for r, state in enumerate(states)
    ]
    before = [{key: x.clone() for key, x in state.items()} for state in states]
    transport = Simulated(len(xs))
    together = Lockstep(transport)
    with transport.meter.part(torch.device("cpu")):
        together.start([{0: method.compress(x.clone(), t)} for x, t in zip(xs, turns, strict=True)])
        ended = together.finish()
    for kept, old in zip(states, before, strict=True):
        assert all(torch.equal(kept[key], x) for key, x in old.items()), "old state was changed in place"
    means, rests = zip(*(mine[0] for mine in ended), strict=True)
    assert all(torch.equal(mean, means[0]) for mean in means), "workers differ"
    states[:] = [turn.state for turn in turns]
    return Step(means[0], list(rests), transport.meter)


def normal(*shape: int, workers: int, seed: int = 0) -> list[Tensor]:
    """Random tensors, one for each worker."""
    stream = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=stream) for _ in range(workers)]


def mean(given: list[dict[str, Tensor]], name: str) -> Tensor:
    """What workers' gradients of one name come to on average."""
    return torch.stack([g[name] for g in given]).mean(0)
