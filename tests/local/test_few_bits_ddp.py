"""Local steps with SparseLoCo, and with few bits and Muon inside (MuLoCo), in real processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from local_workers import diloco
from torch import Tensor, nn, optim

import low_bits
import pufferfish as pf
from nested import equal
from processes import in_processes, same_everywhere
from pufferfish.compression import Int2, Int4, LoCo, Settings, Simulated, SparseLoCo
from pufferfish.local.local_steps import LocalSteps

H = 2
SPARSE = SparseLoCo(k=4, chunk=64)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def adamw(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.AdamW(model.parameters(), lr=1e-2)]


def muon(model: nn.Module) -> list[optim.Optimizer]:
    """Muon for the inner matrix, AdamW for the first and the last layer and the biases."""
    matrix = model[2].weight
    others = [p for p in model.parameters() if p is not matrix]
    return [optim.Muon([matrix], lr=0.02), optim.AdamW(others, lr=1e-2)]


def update(model: nn.Module, optimizers: list[optim.Optimizer], step: int, worker: int) -> None:
    stream = torch.Generator().manual_seed(100 * step + worker)
    x, y = torch.randn(8, 16, generator=stream), torch.randint(3, (8,), generator=stream)
    nn.functional.cross_entropy(model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(
    local: LocalSteps, model: nn.Module, optimizers: list[optim.Optimizer], steps: range, worker: int
) -> None:
    for step in steps:
        update(model, optimizers, step, worker)
        local.step(model)
    for name, x in model.state_dict().items():
        assert local.updates or same_everywhere(x), name


def one_after_the_other(
    size: int,
    steps: int,
    make: Callable[[nn.Module], list[optim.Optimizer]],
    average: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]],
    outer: Callable[[list[nn.Parameter]], optim.Optimizer],
) -> nn.Module:
    """Train all workers in turn; `average` maps their differences from the anchor to the outer gradient."""
    anchor, workers = build(), [build() for _ in range(size)]
    optimizers, outer_optimizer = [make(worker) for worker in workers], outer(list(anchor.parameters()))
    for step in range(steps):
        for i, worker in enumerate(workers):
            update(worker, optimizers[i], step, i)
        if step % H == H - 1:
            start = {name: p.detach() for name, p in anchor.named_parameters()}
            means = average([{n: start[n] - p.detach() for n, p in w.named_parameters()} for w in workers])
            for name, p in anchor.named_parameters():
                p.grad = means[name]
            outer_optimizer.step()
            for worker in workers:
                worker.load_state_dict(anchor.state_dict())
    return anchor


def sparse_equals_the_papers_loop(rank: int, size: int, folder: str) -> None:
    """e = 0.95·e + Δ, the largest of each chunk in 2 bits, plain outer SGD; the last layer is not compressed."""

    def plain(params: list[nn.Parameter]) -> optim.Optimizer:
        return optim.SGD(params, lr=0.6)

    errors: list[dict[str, np.ndarray]] = [{} for _ in range(size)]

    def average(differences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        means = {name: torch.zeros_like(x) for name, x in differences[0].items()}
        for e, mine in zip(errors, differences, strict=True):
            for name, x in mine.items():
                sent = x.double().numpy()
                if not name.startswith("4"):
                    e[name] = 0.95 * e.get(name, 0) + sent
                    sent = low_bits.sparse_loco(e[name], side=8, k=4)
                    e[name] = e[name] - sent
                means[name] += torch.tensor(sent / size, dtype=torch.float32)
        return means

    model = build()
    local = LocalSteps(H, outer=plain, method={"0": SPARSE, "2": SPARSE})
    local.start(model)
    train(local, model, adamw(model), range(8), rank)
    expected = one_after_the_other(size, 8, adamw, average, plain)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, expected.state_dict()[name], rtol=1e-3, atol=1e-5)
    sent = 4 * (2 + 6) // 8 + 3  # for 64 elements: 4 of them, each with its place
    compressed = (16 * 64 + 64 * 64 + 2 * 64) // 64 * sent
    assert local.meter.collective_bytes["all_gather"] == 4 * compressed


def muon_inside_with_two_bits(rank: int, size: int, folder: str) -> None:
    """MuLoCo: two inner optimizers, of which the local steps know nothing, and Nesterov momentum outside."""
    simulated = Simulated(Settings(Int2(64)), size)
    model = build()
    local = LocalSteps(H, outer=diloco, method=Int2(64))
    local.start(model)
    train(local, model, muon(model), range(6), rank)
    expected = one_after_the_other(size, 6, muon, lambda xs: simulated.average(xs)[0], diloco)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, expected.state_dict()[name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(x, build().state_dict()[name])


def resumes_exactly(rank: int, size: int, folder: str) -> None:
    """In the middle of a round, with the state of both inner optimizers."""
    for method, outer in ((SPARSE, None), (Int4(64), diloco), (Int2(64), diloco), (LoCo(64), diloco)):
        ends = []
        for stops in ((7,), (3, 7)):
            for stop in stops:
                model = build()
                local, optimizers = LocalSteps(H, outer=outer, method=method), muon(model)
                place = f"{folder}/{type(method).__name__}{len(stops)}"
                with pf.Checkpoint(place, model, optimizers, compressor=local) as checkpoint:
                    at = checkpoint.resume()
                    local.start(model)
                    train(local, model, optimizers, range(at.position["step"] if at else 0, stop), rank)
                    checkpoint.save(step=stop)
            ends.append(copy.deepcopy((model.state_dict(), local.state_dict())))
        equal(ends[0], ends[1])


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize(
    ("case", "size"),
    [
        (sparse_equals_the_papers_loop, 2),
        (muon_inside_with_two_bits, 2),
        (resumes_exactly, 2),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_in_real_processes(case: Callable[..., None], size: int, tmp_path: Path) -> None:
    in_processes(case, size, str(tmp_path))


def test_outer_momentum_is_refused_with_sparse_averages() -> None:
    with pytest.raises(ValueError, match="SparseLoCo and the outer SGD both have momentum"):
        LocalSteps(H, outer=diloco, method=SparseLoCo()).start(build())
    LocalSteps(H, outer=lambda params: optim.SGD(params, lr=0.4), method=SparseLoCo()).start(build())
