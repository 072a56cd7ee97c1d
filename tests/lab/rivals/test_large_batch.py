"""LARS, LAMB and SAM against the formulas of their papers, across a switch and a restart; linear scaling by hand."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.lab.train.optimizers import LAMB, LARS, SAM

RHO = 0.1
SHAPES = ((4, 3), (4,), (2, 3, 3, 3), (), (5, 2))


def lars_step(p: Tensor, g: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
    """You, Gitman, Ginsburg 2017; vectors by SGD, without weight decay."""
    if p.dim() > 1:
        w, size, decay = p.norm(), g.norm(), group["weight_decay"]
        g = 0.02 * w / (size + decay * w) * (g + decay * p)
    m = kept["m"] = group["momentum"] * kept.get("m", 0) + g
    p -= group["lr"] * (g + group["momentum"] * m if group["nesterov"] else m)


def lamb_step(p: Tensor, g: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
    """You et al. 2020, algorithm 2, with φ the identity; vectors without weight decay and with ratio 1."""
    beta1, beta2 = group["betas"]
    t = kept["t"] = kept.get("t", 0) + 1
    m = kept["m"] = beta1 * kept.get("m", 0) + (1 - beta1) * g
    v = kept["v"] = beta2 * kept.get("v", 0) + (1 - beta2) * g * g
    r = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
    ratio: Tensor | float = 1.0
    if p.dim() > 1:
        r = r + group["weight_decay"] * p
        ratio = p.norm() / r.norm()
    p -= group["lr"] * ratio * r


@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (lambda groups: LARS(groups, lr=10.0, weight_decay=0.1, trust=0.02), lars_step),
        (lambda groups: LARS(groups, lr=10.0, weight_decay=0.1, trust=0.02, nesterov=True), lars_step),
        (lambda groups: LAMB(groups, lr=0.1, weight_decay=0.3, betas=(0.8, 0.95), eps=0.1), lamb_step),
    ],
    ids=["LARS", "LARS, Nesterov", "LAMB"],
)
@torch.no_grad()
def test_steps_are_those_of_the_paper(make: Callable[[Any], optim.Optimizer], formula: Any) -> None:
    """In two groups, the second with settings of its own; now and then a parameter has no gradient."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    plain: list[Tensor] = [p.detach().clone() for p in ours]
    optimizer = make([{"params": ours[:3]}, {"params": ours[3:], "weight_decay": 0.01, "lr": 3.0}])
    kept: list[dict[str, Any]] = [{} for _ in plain]
    for step in range(8):
        for i, (p, q) in enumerate(zip(ours, plain, strict=True)):
            p.grad = None if (i + step) % 4 == 3 else torch.randn_like(p)
            if p.grad is not None:
                formula(q, p.grad, kept[i], optimizer.param_groups[i > 2])
        optimizer.step()
        torch.testing.assert_close([p.detach() for p in ours], plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_zero_norms_have_ratio_one(kind: Any) -> None:
    empty, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    empty.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    kind([empty, still], lr=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(empty.detach(), torch.full((2, 2), -0.5))
    assert torch.equal(still, torch.ones(2, 2))


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 2), nn.Flatten(), nn.Linear(128, 4)
    ).to(dtype)  # fmt: skip


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(4, (8,), generator=generator)
    x = torch.randn(8, 3, 7, 7, generator=generator, dtype=torch.float64) + y.view(-1, 1, 1, 1)
    return x.to(dtype), y


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, next(model.parameters()).dtype)
    return F.cross_entropy(model(x), y)


def update(model: nn.Module, optimizer: optim.Optimizer, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    if isinstance(optimizer, SAM):
        with optimizer.perturbed(model):
            loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


MAKE: dict[str, tuple[Callable[[nn.Module], optim.Optimizer], set[str]]] = {
    "LARS": (
        lambda m: LARS(m.parameters(), lr=0.2, trust=0.05, weight_decay=1e-4, nesterov=True),
        {"momentum_buffer"},
    ),
    "LAMB": (lambda m: LAMB(m.parameters(), lr=0.03), {"step", "exp_avg", "exp_avg_sq"}),
    "SAM": (lambda m: SAM(m.parameters(), lr=0.01, momentum=0.9, rho=RHO), {"momentum_buffer"}),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_switch_and_back(name: str) -> None:
    """The factors get the state of their weights, all of it, and training goes on."""
    make, carried = MAKE[name]
    model = build()
    optimizer = make(model)
    switch = pf.Switch(rank=0.25, when=pf.AtStep(3), back=pf.AtStep(6))
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as state that was reset
        for step in range(30):
            if switch.step(model, optimizer, step=step):
                for name, p in model.named_parameters():
                    assert set(optimizer.state[p]) == carried, name
                    assert all(x.any() for x in optimizer.state[p].values()), name
            losses.append(update(model, optimizer, step))
    assert switch.merged is not None
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def second_gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """At w + ρ g/‖g‖, on a copy; the first pass alone changes the statistics of `model`."""
    params = list(model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), params)
    norm = torch.cat([g.flatten() for g in grads]).norm()
    there = copy.deepcopy(model)
    for p, g in zip(there.parameters(), grads, strict=True):
        p.data += RHO * g / norm
    return list(torch.autograd.grad(F.cross_entropy(there(x), y), list(there.parameters())))


def test_sam_equals_two_passes_written_out() -> None:
    model, plain = build(torch.float64), build(torch.float64)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    sam, sgd = SAM(model.parameters(), rho=RHO, **settings), optim.SGD(plain.parameters(), **settings)
    for step in range(4):
        update(model, sam, step)
        found = second_gradients(plain, *batch(step, torch.float64))
        for p, g in zip(plain.parameters(), found, strict=True):
            p.grad = g
        sgd.step()
        for (name, x), y in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=name)  # statistics too


@pytest.mark.parametrize("fails", [False, True])
def test_weights_and_statistics_come_back_bit_for_bit(fails: bool) -> None:
    model = build()
    loss_of(model, 0).backward()
    before = copy.deepcopy(model.state_dict())
    try:
        with MAKE["SAM"][0](model).perturbed(model):  # type: ignore[attr-defined]
            assert all(p.grad is None for p in model.parameters())
            assert any(not torch.equal(x, before[name]) for name, x in model.named_parameters())
            loss_of(model, 1).backward()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert before["1.num_batches_tracked"] == 1


def test_one_autocast_around_both_passes() -> None:
    """Autocast keeps bf16 copies of the weights; the second pass must not use those of the first."""
    one, other = build(), build()
    with torch.autocast("cpu", torch.bfloat16):
        update(one, MAKE["SAM"][0](one), 0)
    sam = SAM(other.parameters(), lr=0.01, momentum=0.9, rho=RHO)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(other, 0).backward()
    with sam.perturbed(other), torch.autocast("cpu", torch.bfloat16):
        loss_of(other, 0).backward()
    sam.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def two_workers(rank: int, size: int) -> None:
    """Each climbs by its own gradient and sends only the second; BatchNorm as DDP has it, rank 0's."""
    model, plain = build(), build()
    ddp = DDP(model)
    sent: list[int] = []

    def count(group, bucket):  # type: ignore[no-untyped-def]  # DDP wants to read annotations
        sent.append(1)
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(None, count)
    sam = SAM(model.parameters(), lr=0.1, momentum=0.9, rho=RHO)
    theirs = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = (part.chunk(size) for part in batch(step))
        with ddp.no_sync():
            F.cross_entropy(ddp(x[rank]), y[rank]).backward()
        with sam.perturbed(model):
            F.cross_entropy(ddp(x[rank]), y[rank]).backward()
        sam.step()
        sam.zero_grad()
        assert len(sent) == step + 1  # one bucket a step

        workers = [copy.deepcopy(plain) for _ in range(size)]
        found = [
            second_gradients(net, *part) for net, part in zip(workers, zip(x, y, strict=True), strict=True)
        ]
        for p, *grads in zip(plain.parameters(), *found, strict=True):
            p.grad = torch.stack(grads).mean(0)
        theirs.step()
        for b, first in zip(plain.buffers(), workers[0].buffers(), strict=True):
            b.copy_(first)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)
            assert same_everywhere(one), name
        if rank == 0:
            for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.timeout(120)
def test_sam_on_two_workers() -> None:
    in_processes(two_workers, 2)
