"""Complex parameters, in real processes on gloo: compressed and averaged as pairs of real numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.compression import BFloat16, BlockInt8, NoCompression, PowerSGD, Settings, TopK
from pufferfish.compression.method import Method


class Net(nn.Module):
    """A complex matrix, a bias, one in another memory order, and real layers. With `pairs`, all of it in real numbers."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = {
            "matrix": torch.randn(24, 40, dtype=torch.complex64) / 5,
            "bias": torch.randn(40, dtype=torch.complex64),
            "turned": torch.randn(16, 40, dtype=torch.complex64).t() / 5,
        }
        self.real = nn.Linear(32, 24)
        for name, value in values.items():
            setattr(self, name, nn.Parameter(torch.view_as_real(value).clone() if pairs else value))

    def forward(self, x: Tensor) -> Tensor:
        matrix, bias, turned = (
            p if p.is_complex() else torch.view_as_complex(p) for p in (self.matrix, self.bias, self.turned)
        )
        return torch.view_as_real((self.real(x).to(torch.complex64) @ matrix + bias).exp() @ turned)


def real_values(model: nn.Module) -> list[Tensor]:
    return [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in model.parameters()]


def train(ddp: DDP, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x / 8).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(same_everywhere(p) for p in real_values(ddp))


def wrapped(model: nn.Module, small: bool = False) -> tuple[DDP, torch.optim.Optimizer]:
    ddp = DDP(model, bucket_cap_mb=0.005 if small else None, gradient_as_bucket_view=small)
    # Powers of two: products of complex numbers with others round differently from those of their parts.
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5)


def equal(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(real_values(model), real_values(other), strict=True))


def compression_is_that_of_pairs(rank: int, size: int) -> None:
    """Bit for bit that of a model with the same parameters as pairs, and after a restart too."""
    methods: list[Method] = [NoCompression(), BFloat16(), TopK(0.1), PowerSGD(2), BlockInt8(64)]
    for method in methods:
        ends: list[DDP] = []
        for pairs in (False, True):
            ddp, optimizer = wrapped(Net(pairs), small=not pairs)
            hook = pf.compress(ddp, method, optimizer=optimizer, settings=Settings(smallest=100))
            train(ddp, optimizer, range(2), rank)
            again, other = wrapped(Net(pairs))
            again.load_state_dict(ddp.state_dict())
            saved = copy.deepcopy((optimizer.state_dict(), hook.state_dict()))
            other.load_state_dict(saved[0])
            pf.compress(again, method, optimizer=other, settings=Settings(smallest=100)).load_state_dict(
                saved[1]
            )
            train(ddp, optimizer, range(2, 4), rank)
            train(again, other, range(2, 4), rank)
            assert equal(ddp, again), method
            ends.append(ddp)
        assert equal(*ends), method


def shards_are_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64))
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(
        ValueError, match=r"compress: 1\.weight is complex, which is supported under DDP only"
    ):
        pf.compress(model, replicas=mesh["replicate"].get_group())


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize("case", [compression_is_that_of_pairs, shards_are_refused])
def test_in_real_processes(case: Callable[[int, int], None]) -> None:
    in_processes(case, 2)
