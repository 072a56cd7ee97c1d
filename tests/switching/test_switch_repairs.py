"""Accidents at the switch: an error on one worker is raised on all, and weights that differ are repaired."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fsdp_nets
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.layers import LowRank
from pufferfish.planning import svd


class Net(nn.Module):
    """With a parameter of every kind: factorized, dense, a bias, a complex one and one in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.phase = nn.Parameter(torch.randn(64, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(64, 8).t())
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()) * self.phase.abs()
        return self.last(nn.functional.linear(x, self.turned))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int = 0) -> None:
    torch.manual_seed(100 * step + rank)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def is_low_rank(model: nn.Module) -> bool:
    return any(isinstance(m, LowRank) for m in model.modules())


def workers_agree(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        assert same_everywhere(torch.view_as_real(p) if p.is_complex() else p), name


@contextmanager
def warned(words: str) -> Iterator[None]:
    """Check that there is exactly one warning from the block."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    assert [re.search(words, str(w.message)) is not None for w in found] == [True], [
        str(w.message) for w in found
    ]


def evaluation_fails_on_one_worker(rank: int, size: int) -> None:
    """Before the switch nothing is changed; after it, the report says that the model is low-rank."""
    for good_calls in (0, 1):
        ddp = DDP(Net())
        optimizer, calls = momentum(ddp), []

        def evaluate(model: nn.Module, calls: list[int] = calls, good_calls: int = good_calls) -> float:
            calls.append(1)
            if rank == 1 and len(calls) > good_calls:
                raise FileNotFoundError("held-out batch")
            return 1.0

        switch = pf.Switch(rank=0.25, when=pf.AtStep(0), evaluate=evaluate)
        with pytest.raises(OSError, match=r"^rank 1: held-out batch$"):
            switch.step(ddp, optimizer, step=0)
        assert is_low_rank(ddp) == switch.low_rank == (good_calls == 1)
        update(ddp, optimizer, 0, rank)  # and the job could go on
        workers_agree(ddp.module)


@contextmanager
def failing_svd(fails: bool) -> Iterator[None]:
    def fail(W: Tensor, r: int) -> None:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(svd, "split", fail)
        yield


def svd_fails_on_one_worker(rank: int, size: int) -> None:
    ddp = DDP(Net())
    optimizer, switch = momentum(ddp), pf.Switch(rank=0.25, when=pf.AtStep(0))
    with (
        failing_svd(rank == 1),
        pytest.raises(RuntimeError, match=r"^rank 1: the algorithm failed to converge$"),
    ):
        switch.step(ddp, optimizer, step=0)
    assert not is_low_rank(ddp)
    assert switch.step(ddp, optimizer, step=0)


def svd_fails_on_one_worker_with_shards(rank: int, size: int) -> None:
    model = fsdp_nets.image_net()
    shard = fsdp_nets.sharder(init_device_mesh("cpu", (size,)))
    shard(model)
    switch = pf.Switch(rank=0.25, when=pf.AtStep(0))
    with (
        failing_svd(rank == 1),
        pytest.raises(RuntimeError, match=r"^rank 1: the algorithm failed to converge$"),
    ):
        switch.rebuild(model, momentum(model), build=fsdp_nets.image_net, shard=shard, step=0)


def weights_differ(rank: int, size: int) -> None:
    """All continue with the values of worker 0, as if nothing had happened there."""
    ddp, untouched = DDP(Net()), DDP(Net())
    optimizers = {model: momentum(model) for model in (ddp, untouched)}
    switches = {
        model: pf.Switch(rank=0.25, when=pf.AtStep(1), back=pf.AtStep(2)) for model in (ddp, untouched)
    }
    net = ddp.module
    for step in range(4):
        if rank == 1 and step == 1:
            with torch.no_grad():
                for p in (net.first.weight, net.last.bias, net.phase, net.turned):
                    p += 1
        if rank == 1 and step == 2:
            with torch.no_grad():
                net.first.down.weight += 1
        names = {1: "phase, turned, first.weight and 1 more", 2: "first.down.weight"}
        if step in names:
            with warned(rf"^switch\.step: {names[step]} differ on worker 1 from worker 0, whose values"):
                switches[ddp].step(ddp, optimizers[ddp], step=step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            switches[untouched].step(untouched, optimizers[untouched], step=step)
            switches[ddp].step(ddp, optimizers[ddp], step=step)
        workers_agree(net)
        for (name, p), q in zip(net.named_parameters(), untouched.module.parameters(), strict=True):
            assert torch.equal(p, q), (step, name)
        for model in (ddp, untouched):
            update(model, optimizers[model], step, rank)
    assert switches[ddp].merged is not None


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize(
    "case",
    [
        evaluation_fails_on_one_worker,
        svd_fails_on_one_worker,
        svd_fails_on_one_worker_with_shards,
        weights_differ,
    ],
)
def test_in_real_processes(case: Callable[[int, int], None]) -> None:
    in_processes(case, 2)
