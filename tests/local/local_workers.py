"""Model, data and optimizers of the local-steps tests, and a sequential reference implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from pufferfish.compression import NoCompression, Settings, Simulated
from pufferfish.compression.settings import Methods
from pufferfish.local.local_steps import LocalSteps

SAMPLES = 4  # per worker and step

Make = Callable[[Any], optim.Optimizer]


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 40, bias=False),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        nn.Linear(40, 40),
        nn.ReLU(),
        nn.Linear(40, 3),
    )


def sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1)


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2)


def diloco(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SAMPLES, 12, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


def started(local: LocalSteps, make: Make = sgd, seed: int = 0) -> tuple[nn.Module, optim.Optimizer]:
    """A model that the workers have in common, and its inner optimizer."""
    model = build(seed)
    local.start(model)
    return model, make(model.parameters())


def update(model: nn.Module, optimizer: optim.Optimizer, step: int, rank: int = 0) -> None:
    x, y = batch(step, rank)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items() if x.is_floating_point()}


def sequential(size: int, h: int, steps: int, make: Make, **options: Any) -> nn.Module:
    """Train all workers one after the other, without fragments and delays."""
    return streaming(size, [list(floats(build()))], h, 0, 0.0, steps, make, **options)[0]


def streaming(
    size: int,
    split: list[list[str]],
    h: int,
    delay: int,
    mixing: float,
    steps: int,
    make: Make,
    *,
    lr: float = 1.0,
    momentum: float = 0.0,
    pairs: int = 1,
    method: Methods | None = None,
) -> list[nn.Module]:
    """Streaming DiLoCo: send fragment p at t ≡ h·p/k (mod h), apply it at t + delay, all workers one after the other.

    Each worker has the batches of `pairs` processes. `method` compresses parameters, not buffers.
    """
    engines = [Simulated(Settings(method or NoCompression()), size) for _ in split]
    workers = [build() for _ in range(size)]
    optimizers = [make(worker.parameters()) for worker in workers]
    anchor = floats(workers[0])
    trained = dict(workers[0].named_parameters()).keys()
    v = {name: torch.zeros_like(a) for name, a in anchor.items()}
    flights: list[tuple[int, dict[str, Tensor]]] = []
    for t in range(1, steps + 1):
        for i, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            if pairs > 1:
                worker[1].eval()
            batches = [batch(t - 1, pairs * i + j) for j in range(pairs)]
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            nn.functional.cross_entropy(worker(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, names in enumerate(split):
            if t % h == h * p // len(split):
                ends = [{n: anchor[n] - worker.state_dict()[n] for n in names} for worker in workers]
                delta = {n: torch.stack([end[n] for end in ends]).mean(0) for n in names}
                if method is not None:
                    ends = [{n: x for n, x in end.items() if n in trained} for end in ends]
                    delta |= engines[p].average(ends)[0]
                flights.append((t + delay, delta))
        for delta in [delta for lands, delta in flights if lands == t]:
            for n, d in delta.items():
                v[n] = momentum * v[n] + d
                anchor[n] = anchor[n] - (lr * (d + momentum * v[n]) if n in trained else d)
                for worker in workers:
                    x = worker.state_dict()[n]
                    x.copy_(mixing * x + (1 - mixing) * anchor[n])
    return workers


def train(
    local: LocalSteps, model: nn.Module, optimizer: optim.Optimizer, steps: range, rank: int
) -> list[int]:
    """Train, and return the steps after which the workers averaged."""
    averaged = []
    for step in steps:
        update(model, optimizer, step, rank)
        if local.step(model):
            averaged.append(step + 1)
    return averaged


def close(model: nn.Module, other: nn.Module) -> None:
    for (name, x), y in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
