"""One step of a method on simulated workers, random tensors and means, for tests against slow references."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pufferfish.compression import Meter, Method, StepContext
from pufferfish.compression.exchange import Exchange
from pufferfish.compression.simulated import simulated_transports

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
    """Run `method` on the workers' `xs`, (b, d) or (b, m, n) each. `states` are theirs, and are replaced."""
    states = [{} for _ in xs] if states is None else states
    names = tuple(f"t{i}" for i in range(len(xs[0])))
    contexts = [
        StepContext(worker, len(xs), step, names, seed=seed, exchange=exchange, state=dict(state))
        for worker, state in enumerate(states)
    ]
    before = [{key: x.clone() for key, x in state.items()} for state in states]
    transports = simulated_transports(len(xs))
    exchanges = [Exchange(transport) for transport in transports]
    for x, context, running in zip(xs, contexts, exchanges, strict=True):
        running.start({0: method.compress(x.clone(), context)})
    while max([running.advance() for running in exchanges]):
        pass
    for state, old in zip(states, before, strict=True):
        assert all(torch.equal(state[key], x) for key, x in old.items()), "old state was changed in place"
    results = [running.results[0] for running in exchanges]
    means = [torch.bmm(*mean) if isinstance(mean, tuple) else mean for mean, _ in results]
    assert all(torch.equal(mean, means[0]) for mean in means), "workers differ"
    states[:] = [context.state for context in contexts]
    return Step(means[0], [rest for _, rest in results], transports[0].meter)


def normal(*shape: int, workers: int, seed: int = 0) -> list[Tensor]:
    """Random tensors, one for each worker."""
    stream = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=stream) for _ in range(workers)]


def mean(given: list[dict[str, Tensor]], name: str) -> Tensor:
    """Mean of the workers' gradients of one name."""
    return torch.stack([g[name] for g in given]).mean(0)
