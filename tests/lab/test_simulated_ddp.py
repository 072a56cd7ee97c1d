"""Simulated workers equal real DDP workers."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from processes import in_processes
from pufferfish.compression import (
    DGC,
    BFloat16,
    BlockInt8,
    BlockRandomK,
    Method,
    NoCompression,
    PowerSGD,
    RandomK,
    Settings,
    TopK,
    compress,
)  # fmt: skip
from pufferfish.lab.train.simulated import SimulatedDDP


class Arm(NamedTuple):
    method: Method
    scope: Literal["layer", "global"] = "layer"


#: A rising, a constant and a falling rate; the first step has none.
RATES = [0.0, 0.1, 0.1, 0.02, 0.05]
ARMS = {
    "plain": Arm(NoCompression()),
    "bf16": Arm(BFloat16()),
    "int8": Arm(BlockInt8()),
    "powersgd 4": Arm(PowerSGD(4)),
    "top-k 1 %": Arm(TopK(0.01)),
    "top-k 1 %, global": Arm(TopK(0.01), "global"),
    "dgc 0.1 %": Arm(DGC(0.999, momentum=0.9, warm_up=1)),
    "dgc 0.1 %, global": Arm(DGC(0.999, momentum=0.9, warm_up=1), "global"),
    "random-k 1 %, all-reduce": Arm(RandomK(0.01, "shared")),
    "random-k 1 %, all-gather": Arm(RandomK(0.01, "own")),
    "block-random-k 1 %, all-reduce": Arm(BlockRandomK(0.01, "shared")),
    "block-random-k 1 %, all-reduce, global": Arm(BlockRandomK(0.01, "shared"), "global"),
    "block-random-k 1 %, all-gather": Arm(BlockRandomK(0.01, "own")),
}
EXACT = {"rtol": 0.0, "atol": 0.0}
#: Of the 4-worker tests these run by default: messages that are summed, and messages that are gathered.
FOUR = ("powersgd 4", "top-k 1 %")
#: Nothing is summed, so the bits are equal; with three or more workers, sums may differ in the last bit.
GATHERED = {"int8", "top-k 1 %", "top-k 1 %, global", "dgc 0.1 %", "random-k 1 %, all-gather", "block-random-k 1 %, all-gather"}  # fmt: skip


def build(layout: torch.memory_format = torch.contiguous_format) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10),
    ).to(memory_format=layout)  # fmt: skip


def part(step: int, rank: int, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 3, 16, 16, generator=generator).to(memory_format=layout)
    return x, torch.randint(10, (4,), generator=generator)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def equals(
    rank: int,
    size: int,
    arm: Arm,
    layout: torch.memory_format,
    close: dict[str, float],
    **options: Any,
) -> None:
    """Take the same steps with real workers, then simulated ones in rank 0."""
    make = plain_sgd if options else momentum_sgd
    ddp = DDP(build(layout), bucket_cap_mb=0.002)
    optimizer = make(ddp, arm.method)
    hook = compress(
        ddp, arm.method, optimizer=optimizer, settings=Settings(scope=arm.scope, seed=3, **options)
    )
    for step, rate in enumerate(RATES):
        set_rate(optimizer, rate)
        optimizer.zero_grad()
        x, y = part(step, rank, layout)
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    if rank > 0:
        return
    model = build(layout)
    optimizer = make(model, arm.method)
    settings = Settings(arm.method, scope=arm.scope, seed=3, **options)
    workers = SimulatedDDP(model, settings, size, optimizer=optimizer)
    for step, rate in enumerate(RATES):
        set_rate(optimizer, rate)
        workers.backward(
            lambda x, y: nn.functional.cross_entropy(model(x), y),
            [part(step, r, layout) for r in range(size)],
        )
        optimizer.step()
    for name, x in ddp.module.state_dict().items():  # BatchNorm's statistics too
        torch.testing.assert_close(
            x, model.state_dict()[name], **close, msg=lambda m, name=name: f"{arm}, {layout}, {name}: {m}"
        )
    sent = [(meter.collective_bytes, meter.wire_bytes) for meter in (hook.meter, workers.meter)]
    assert sent[0] == sent[1]


def plain_sgd(model: nn.Module, method: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def momentum_sgd(model: nn.Module, method: Method) -> torch.optim.Optimizer:
    """SGD with momentum, for what DGC compresses without: the method has its own."""
    weights: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() > 1]}
    if isinstance(method, DGC):
        weights |= {"momentum": 0.0, "nesterov": False}
    others = {"params": [p for p in model.parameters() if p.dim() < 2]}
    return torch.optim.SGD([weights, others], lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4)


def two_workers(rank: int, size: int, name: str) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        equals(rank, size, ARMS[name], layout, EXACT)


def four_workers(rank: int, size: int, name: str) -> None:
    close = EXACT if name in GATHERED else {"rtol": 0.0, "atol": 1e-3 if name == "bf16" else 1e-5}
    # With smallest=0, since otherwise 1-D tensors are summed.
    equals(rank, size, ARMS[name], torch.channels_last, close, smallest=0)


@pytest.mark.parametrize("name", ARMS)
def test_equals_two_real_workers(name: str) -> None:
    in_processes(two_workers, 2, name)


@pytest.mark.parametrize(
    "name", [name if name in FOUR else pytest.param(name, marks=pytest.mark.slow) for name in ARMS]
)
def test_equals_four_real_workers(name: str) -> None:
    in_processes(four_workers, 4, name)


def test_one_worker_is_an_ordinary_backward_pass() -> None:
    layout = torch.channels_last
    model, other = build(layout), build(layout)
    x, y = part(0, 0, layout)
    nn.functional.cross_entropy(model(x), y).backward()
    SimulatedDDP(other, Settings(NoCompression()), 1).backward(
        lambda x, y: nn.functional.cross_entropy(other(x), y), [(x, y)]
    )
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)
        assert q.grad.stride() == q.stride()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_refusals() -> None:
    model = build()
    with pytest.raises(ValueError, match="DGC has its own momentum, and so does the SGD"):
        SimulatedDDP(
            model, Settings(DGC()), 2, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
    workers = SimulatedDDP(model, Settings(TopK()), 2)
    with pytest.raises(ValueError, match="in 1 parts, but there are 2 workers"):
        workers.backward(lambda x, y: model(x).sum(), [part(0, 0, torch.contiguous_format)])
    assert all(p.grad is None for p in model.parameters())
