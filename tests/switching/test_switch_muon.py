"""Muon and AdamW through the switch, under DDP and under FSDP2, in real processes on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from optimizers import Net, batch, muon_and_adamw
from processes import in_processes, same_everywhere
from pufferfish.lowrank.rewrite import whole
from pufferfish.switching.fsdp2 import parameters


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()  # batch statistics of a shard are not those of the batch


def switch() -> pf.Switch:
    return pf.Switch(rank=4, keep=["head"], when=pf.AtStep(2))


def check_ddp(rank: int, size: int) -> None:
    model = build()
    optimizers, here = muon_and_adamw(model), switch()
    ddp = DDP(model)
    for step in range(5):
        if step == 2:
            M = optimizers[0].state[model.fc.weight]["momentum_buffer"]
        assert here.step(ddp, optimizers, step=step) == (step == 2)
        if step == 2:
            up, down = model.fc.up.weight, model.fc.down.weight
            carried = [optimizers[0].state[p]["momentum_buffer"] for p in (up, down)]
            torch.testing.assert_close(carried, [M @ down.mT.detach(), up.mT.detach() @ M])
        x, y = (part.chunk(size)[rank] for part in batch(step))
        nn.functional.cross_entropy(ddp(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            assert same_everywhere(p), (step, name)
    pf.merge_(ddp, optimizers)
    assert optimizers[0].state[model.fc.weight]["momentum_buffer"].any()


def test_under_ddp() -> None:
    in_processes(check_ddp, 2)


def build_sharded() -> nn.Module:
    """Sizes that the workers cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 65), nn.ReLU(), nn.GRU(65, 33, batch_first=True))


def check_fsdp2(rank: int, size: int, kind: type[optim.Muon]) -> None:
    """Beside the same in one process: Muon orthogonalises whole matrices, not shards."""
    mesh = init_device_mesh("cpu", (size,))

    def shard(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh)

    model, alone = build_sharded(), build_sharded()
    shard(model)
    pairs = [muon_and_adamw(model, kind), muon_and_adamw(alone, kind)]
    here, beside = (pf.Switch(rank=4, when=pf.AtStep(1)) for _ in range(2))
    x = torch.randn(256, 3, 48, generator=torch.Generator().manual_seed(1))  # gradients of full rank
    for step in range(3):
        if step == 1:  # go on from the same numbers
            copy_to(alone, model, pairs)
        model, _ = here.rebuild(model, pairs[0], build=build_sharded, shard=shard, step=step)
        assert beside.step(alone, pairs[1], step=step) == (step == 1)
        if step == 1:
            check_same(model, alone, pairs)
        for one, optimizers in ((model, pairs[0]), (alone, pairs[1])):
            before = {name: whole(p).clone() for name, p in parameters(one).items()}
            one(x)[0].square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            changes = {name: whole(p) - before[name] for name, p in parameters(one).items()}
            if one is model:
                mine = changes
        for name, change in changes.items():
            # Newton–Schulz runs in bf16, whose sums depend on the shards; shards by themselves would differ by 0.3.
            assert (mine[name] - change).norm() < 0.2 * change.norm(), (step, name)


def copy_to(alone: nn.Module, model: nn.Module, pairs: list[list[optim.Optimizer]]) -> None:
    for p, q in zip(parameters(model).values(), alone.parameters(), strict=True):
        q.data.copy_(whole(p))
        for mine, other in zip(*pairs, strict=True):
            for key, value in mine.state.get(p, {}).items():
                other.state[q][key].copy_(whole(value))


def check_same(model: nn.Module, alone: nn.Module, pairs: list[list[optim.Optimizer]]) -> None:
    """The same parameters to the bit, in the same places, with the same state."""
    names = [
        [[sorted(g["param_names"]) for g in optimizer.param_groups] for optimizer in pair] for pair in pairs
    ]
    assert names[0] == names[1]
    theirs = dict(alone.named_parameters())
    for name, p in parameters(model).items():
        assert isinstance(p, DTensor)
        assert torch.equal(whole(p), theirs[name].detach()), name
        for mine, other in zip(*pairs, strict=True):
            state, same = mine.state.get(p, {}), other.state.get(theirs[name], {})
            assert state.keys() == same.keys(), name
            for key, value in state.items():
                torch.testing.assert_close(whole(value), same[key], rtol=1e-5, atol=1e-7)


def check_fsdp2_refusal(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    model = build_sharded()
    fully_shard(model, mesh=mesh)
    muon = optim.Muon([p for p in model.parameters() if p.dim() == 2])
    held = list(muon.param_groups[0]["params"])
    with pytest.raises(ValueError, match=r"2\.weight_ih_l0\.up\.weight: .* but Muon takes matrices only"):
        pf.Switch(rank=4, when=pf.AtStep(0)).rebuild(
            model, muon, build=build_sharded, shard=lambda m: None, step=0
        )
    assert all(a is b for a, b in zip(muon.param_groups[0]["params"], held, strict=True))
    model(torch.ones(1, 3, 48))
    dist.barrier()


def fsdp2_cases(rank: int, size: int) -> None:
    check_fsdp2(rank, size, optim.Muon)
    check_fsdp2(rank, size, pf.lowrank.Muon)
    check_fsdp2_refusal(rank, size)


def test_under_fsdp2() -> None:
    in_processes(fsdp2_cases, 2)
