"""A small network, trained by real processes with every method: what tests of the hook share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from processes import same_everywhere
from pufferfish.compression import (
    DGC,
    QSGD,
    Accordion,
    Aggregator,
    AlternatingPowerSGD,
    Atomo,
    BFloat16,
    BlockFP8,
    BlockInt8,
    BlockRandomK,
    EFSignSGD,
    Float16,
    Hook,
    NoCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    SignSGD,
    Signum,
    Simulated,
    TernGrad,
    Threshold,
    TopK,
    compress,
)

#: No sums on the way: real and simulated workers agree in every bit.
BY_PIECES = (
    "topk", "random, own", "sign", "qsgd", "block random, own", "threshold", "dgc", "signum", "ef-sign",
    "terngrad", "int8", "fp8",
)  # fmt: skip
METHODS: dict[str, Any] = {
    "none": NoCompression(),
    "bf16": BFloat16(),
    "fp16": Float16(),
    "powersgd": PowerSGD(rank=2),
    "topk": TopK(0.05),
    "random": RandomK(0.05),
    "random, own": RandomK(0.05, "own"),
    "random, unbiased": RandomK(0.3, scale=True),
    "sign": SignSGD(),
    "qsgd": QSGD(levels=3, bucket=64),
    "block random, own": BlockRandomK(0.05, "own"),
    "threshold": Threshold(1e-3),
    "dgc": DGC(0.9, warm_up=2),
    "one bit": OneBitSGD(),
    "signum": Signum(),
    "ef-sign": EFSignSGD(),
    "terngrad": TernGrad(),
    "atomo": Atomo(1),
    "int8": BlockInt8(64),
    "fp8": BlockFP8(64),
    "alternating": AlternatingPowerSGD(2),
    "accordion": Accordion(PowerSGD(2), PowerSGD(1), every=2),
    "several": {"middle": PowerSGD(rank=1), "first*": TopK(0.1), "*": BFloat16()},
}


DEVICE = "cpu"


class Net(nn.Module):
    """Its layers run in another order than they are named; `maybe` only where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(24, 4)
        self.middle = nn.Linear(32, 24)
        self.maybe = nn.Linear(24, 24)
        self.first = nn.Conv2d(3, 8, 3, stride=2)

    def forward(self, x: Tensor, maybe: bool = False) -> Tensor:
        x = self.middle(self.first(x).relu().flatten(1)).relu()
        return self.last(self.maybe(x).relu() if maybe else x)


def build(maybe: bool = False) -> Net:
    net = Net().to(DEVICE, memory_format=torch.channels_last)
    net.maybe.requires_grad_(maybe)
    return net


def wrapped(
    method: Any = None, *, maybe: bool = False, ddp: dict[str, Any] | None = None, **options: Any
) -> tuple[DDP, Hook]:
    """With several buckets from the second step on."""
    model = DDP(build(maybe), **({"bucket_cap_mb": 0.002, "find_unused_parameters": maybe} | (ddp or {})))
    return model, compress(model, method, **({"smallest": 0} | options))


def momentum(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loss(model: nn.Module, step: int, rank: int, maybe: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 3, 9, 9, generator=generator)[..., :5, :5]
    y = torch.randint(4, (6,), generator=generator)
    return nn.functional.cross_entropy(model(x.to(DEVICE), maybe), y.to(DEVICE))


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        loss(ddp, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(step: int, rank: int) -> dict[str, Tensor]:
    """A worker's own gradients, at the weights of the start."""
    net = build()
    loss(net, step, rank).backward()
    return grads(net)


def gradients_are_the_aggregators(
    name: str, rank: int, size: int, options: dict[str, Any] | None = None, **ddp_options: Any
) -> None:
    """DDP hands over what each worker has, and gets what the aggregator makes of it, memory and all."""
    ddp, hook = wrapped(METHODS[name], ddp=ddp_options, **(options or {}))
    reference = Aggregator(METHODS[name], Simulated(size), smallest=0, **(options or {}))
    for step in range(3):
        ddp.zero_grad()
        loss(ddp, step, rank).backward()
        given = [alone(step, r) for r in range(size)]
        expected = copy.deepcopy(given[rank])
        begun = reference.begin(given[0])  # in pieces, where the hook has some
        begun.add(given)
        begun.finish([expected if r == rank else mine for r, mine in enumerate(given)])
        close = (
            {"rtol": 2e-2, "atol": 2e-3}
            if name in ("bf16", "fp16", "several")
            else {"rtol": 1e-4, "atol": 1e-6}
        )
        for n, g in grads(ddp.module).items():
            torch.testing.assert_close(g, expected[n], **close, msg=lambda m, n=n: f"{name}, {n}: {m}")
            assert same_everywhere(g), (name, n)
    assert hook.meter.handed == reference.meter.handed
    assert hook.meter.steps == 3


def resumes(name: str, rank: int, options: dict[str, Any] | None = None, **ddp_options: Any) -> None:
    """Saved in the middle and loaded into a fresh job, whose buckets are others, it ends with the same bits."""
    ends = []
    saved: Any = None
    for stopped in (False, True):
        buckets = {"bucket_cap_mb": 25 if stopped else 0.002}
        ddp, hook = wrapped(METHODS[name], ddp=buckets | ddp_options, **(options or {}))
        optimizer = momentum(ddp)
        if stopped:
            ddp.module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            hook.load_state_dict(saved[2])
        else:
            train(ddp, optimizer, range(3), rank)
            saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict(), hook.state_dict()))
        train(ddp, optimizer, range(3, 6), rank)
        assert same_everywhere(weights(ddp))
        ends.append(weights(ddp))
    assert torch.equal(*ends), name
