"""A small network, trained by real processes with every method: shared by the tests of the DDP hook."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from processes import same_everywhere
from pufferfish.compression import (
    DGC,
    QSGD,
    Accordion,
    AlternatingPowerSGD,
    Atomo,
    BFloat16,
    BlockFP8,
    BlockInt8,
    BlockRandomK,
    DDPHook,
    EFSignSGD,
    Float16,
    Int2,
    Int4,
    LoCo,
    NoCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    Settings,
    SignSGD,
    Signum,
    Simulated,
    SparseLoCo,
    TernGrad,
    Threshold,
    TopK,
    compress,
)

METHODS: dict[str, Any] = {
    "none": NoCompression(),
    "bf16": BFloat16(),
    "fp16": Float16(),
    "powersgd": PowerSGD(rank=2),
    "powersgd, later": PowerSGD(rank=2, start=2),
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
    "int4": Int4(64),
    "int2": Int2(64),
    "loco": LoCo(64, reset=4),
    "sparseloco": SparseLoCo(k=8, chunk=256),
    "alternating": AlternatingPowerSGD(2),
    "accordion": Accordion(PowerSGD(2), PowerSGD(1), every=2),
    "several": {"middle": PowerSGD(rank=1), "first*": TopK(0.1), "*": BFloat16()},
}
#: Methods that share a test.
GROUPS = {
    "casts": ("none", "bf16", "fp16", "several"),
    "low rank": ("powersgd", "powersgd, later", "alternating", "atomo", "accordion"),
    "sparse": ("topk", "random", "random, own", "random, unbiased"),
    "more sparse": ("block random, own", "threshold", "dgc", "sparseloco"),
    "signs": ("sign", "signum", "ef-sign", "one bit"),
    "levels": ("qsgd", "terngrad", "int8", "fp8"),
    "few bits": ("int4", "int2", "loco"),
}
assert sorted(name for group in GROUPS.values() for name in group) == sorted(METHODS)
#: One method for each collective: all-reduce, all-gather, all-to-all.
COLLECTIVES = ("powersgd", "topk", "int8")

DEVICE = "cpu"


class Net(nn.Module):
    """The layers run in another order than they are named; `maybe` is used only where the call says so."""

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
) -> tuple[DDP, DDPHook]:
    """A wrapped model, which has several buckets from the second step on, and its hook."""
    model = DDP(build(maybe), **({"bucket_cap_mb": 0.002, "find_unused_parameters": maybe} | (ddp or {})))
    return model, compress(model, method, settings=Settings(**({"smallest": 0} | options)))


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


def own_gradients(step: int, rank: int) -> dict[str, Tensor]:
    """A worker's own gradients, at the initial weights."""
    net = build()
    loss(net, step, rank).backward()
    return grads(net)


def gradients_are_those_of_simulated_workers(
    rank: int, size: int, name: str, options: dict[str, Any] | None = None, **ddp_options: Any
) -> None:
    """DDP's gradients after the hook are the means of simulated workers, which have the same buckets."""
    ddp, hook = wrapped(METHODS[name], ddp=ddp_options, **(options or {}))
    reference = Simulated(Settings(METHODS[name], smallest=0, **(options or {})), size)
    for engine in reference.engines:
        engine.arrange = partial(engine.arrange, bucket_bytes=engine.overlap_bytes)  # type: ignore[method-assign]
    rounded = name in ("bf16", "fp16", "several")
    close = {"rtol": 2e-2, "atol": 2e-3} if rounded else {"rtol": 1e-4, "atol": 1e-6}
    for step in range(3):
        ddp.zero_grad()
        loss(ddp, step, rank).backward()
        expected = reference.average([own_gradients(step, worker) for worker in range(size)])[rank]
        for n, g in grads(ddp.module).items():
            torch.testing.assert_close(g, expected[n], **close, msg=lambda m, n=n: f"{name}, {n}: {m}")
            assert same_everywhere(g), (name, n)
    assert hook.meter.collective_bytes == reference.meter.collective_bytes, name
    assert hook.meter.steps == 3


def resumes(
    rank: int, size: int, name: str, options: dict[str, Any] | None = None, **ddp_options: Any
) -> None:
    """Saved in the middle and loaded into a new job, which has other buckets: the end is bit-identical."""
    ends = []
    saved: Any = None
    for resumed in (False, True):
        buckets = {"bucket_cap_mb": 25 if resumed else 0.002}
        ddp, hook = wrapped(METHODS[name], ddp=buckets | ddp_options, **(options or {}))
        optimizer = momentum(ddp)
        if resumed:
            ddp.module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            hook.load_state_dict(saved[2])
        else:
            train(ddp, optimizer, range(3), rank)
            saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict(), hook.state_dict()))
        train(ddp, optimizer, range(3, 6), rank)
        assert same_everywhere(weights(ddp)), name
        ends.append(weights(ddp))
    assert torch.equal(*ends), name
