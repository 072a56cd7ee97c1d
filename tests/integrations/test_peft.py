"""Adapters of peft under DDP: only what is trained is compressed, sent and counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes, preload

peft = pytest.importorskip("peft")
preload("peft")

RANK, WIDTH = 8, 64


def adapted() -> nn.Module:
    """Two frozen layers with adapters, and a head that is trained whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    config = peft.LoraConfig(r=RANK, target_modules=["0", "2"], modules_to_save=["3"])
    return peft.get_peft_model(model, config)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int) -> None:
    for step in range(steps):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(16) % 4).backward()
        optimizer.step()


def only_adapters_are_sent(rank: int, size: int) -> None:
    model = adapted()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
    ddp = DDP(model)
    hook = pf.compress(ddp, pf.compression.BFloat16(), optimizer=optimizer)
    train(ddp, optimizer, 5, rank)
    sent = hook.meter.collective_bytes["all_reduce"]
    assert sent == pytest.approx(5 * 2 * sum(p.numel() for p in trained.values()), rel=0.01)
    assert hook.meter.gradient_bytes == 5 * 4 * sum(p.numel() for p in trained.values())

    hook.use(pf.compression.PowerSGD(2))
    train(ddp, optimizer, 5, rank)
    factors = [p for p in trained.values() if 2 * sum(p.shape) < p.numel()]
    assert factors  # some of the adapters' own factors are large enough to be compressed
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != (name in trained), name
    mine = torch.cat([p.detach().flatten() for p in trained.values()])
    others = [torch.empty_like(mine) for _ in range(size)]
    torch.distributed.all_gather(others, mine)
    assert all(torch.equal(mine, other) for other in others)


def diagnosis_counts_only_adapters(rank: int, size: int) -> None:
    model = adapted()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    ddp = DDP(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    with pf.diagnose(ddp, optimizer, steps=2, methods=[], show=False) as found:
        train(ddp, optimizer, 6, rank)
    assert found.wire_bytes == 2 * (size - 1) / size * 4 * trained
    half = next(option for option in found.options if "BFloat16" in option.name)
    assert half.wire_bytes == pytest.approx(found.wire_bytes / 2, rel=0.01)


@pytest.mark.parametrize(
    "case", [only_adapters_are_sent, diagnosis_counts_only_adapters], ids=lambda f: f.__name__
)
def test_on_two_workers(case: object) -> None:
    in_processes(case, 2)
