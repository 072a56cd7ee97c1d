"""The exact mode, in real processes on gloo."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.distributed import exact
from pufferfish.distributed.exact import exact_


class Net(nn.Module):
    """Its layers run in another order than they are named, so buckets differ once DDP has rebuilt them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(96, 4)
        self.middle = nn.Linear(120, 96)
        self.first = nn.Conv2d(3, 30, 3, stride=2)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu().flatten(1)).relu())


def build(*, unused: bool = False) -> Net:
    net = Net().to(memory_format=torch.channels_last)
    net.unused.requires_grad_(unused)
    return net


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 3, 6, 6, generator=generator)
    y = torch.randint(4, (6,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        loss(ddp, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(model: nn.Module, is_exact: bool = True, **options: Any) -> DDP:
    ddp = DDP(model, **options)
    if is_exact:
        exact_(ddp)
    return ddp


def small_messages() -> None:
    exact._PIECE = 20_000  # so that there are several messages


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def check_averages(rank: int, size: int, half: bool = False, unused: bool = False, **options: Any) -> None:
    """Two backward passes, the first without exchange: the mean of the gradients of all workers."""
    small_messages()
    alone, model = (build(unused=unused) for _ in range(2))
    if half:
        alone.last.bfloat16(), model.last.bfloat16()
    for net in (alone, model):
        net.last.register_forward_pre_hook(lambda m, x: x[0].to(m.weight.dtype))
    ddp = wrapped(model, **options)
    for step in range(3):  # DDP rebuilds its buckets after the first
        alone.zero_grad()
        ddp.zero_grad()
        for part in range(2):
            loss(alone, 2 * step + part, rank).backward()
        with ddp.no_sync():
            loss(ddp, 2 * step, rank).backward()
        loss(ddp, 2 * step + 1, rank).backward()
        for (name, p), own in zip(model.named_parameters(), alone.parameters(), strict=True):
            if p.grad is None or own.grad is None:
                assert p.grad is own.grad is None, name
                assert name.startswith("unused")
                continue
            dist.all_reduce(own.grad)
            close = {"rtol": 2e-2, "atol": 1e-3} if half else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(p.grad, own.grad / size, **close)
            assert same_everywhere(p.grad), name


def averages(rank: int, size: int) -> None:
    check_averages(rank, size)


def averages_in_small_buckets(rank: int, size: int) -> None:
    check_averages(rank, size, bucket_cap_mb=0.02, gradient_as_bucket_view=True)


def averages_with_unused_parameters(rank: int, size: int) -> None:
    check_averages(rank, size, unused=True, find_unused_parameters=True)


def averages_in_bf16(rank: int, size: int) -> None:
    check_averages(rank, size, half=True)


def buckets_do_not_matter(rank: int, size: int) -> None:
    """Plain DDP does not depend on its buckets for two workers only; there the exact mode has the same bits."""
    small_messages()
    ends: dict[bool, list[Tensor]] = {False: [], True: []}
    for is_exact, found in ends.items():
        for cap in (25, 0.02):
            ddp = wrapped(build(), is_exact, bucket_cap_mb=cap)
            train(ddp, momentum(ddp), range(4), rank)
            found.append(weights(ddp))
    assert torch.equal(*ends[True])
    assert torch.equal(*ends[False]) == (size == 2)
    assert torch.equal(ends[False][0], ends[True][0]) == (size == 2)
    torch.testing.assert_close(ends[False][0], ends[True][0], rtol=1e-4, atol=1e-6)


def stays_exact_through_the_switch(rank: int, size: int) -> None:
    small_messages()
    ends = []
    saved: Any = None
    switch = pf.Switch(rank=0.25, when=pf.AtStep(2))
    for stopped in (False, True):
        model = build()
        optimizer = momentum(model)
        if stopped:
            assert switch.report is not None
            pf.reshape_(model, switch.report.plan, optimizer)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        ddp = wrapped(model)
        for step in range(4) if not stopped else ():
            switch.step(ddp, optimizer, step=step)
            train(ddp, optimizer, range(step, step + 1), rank)
            if step == 2:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if stopped:
            train(ddp, optimizer, range(3, 4), rank)
        assert any(isinstance(m, pf.layers.LowRank) for m in ddp.modules())
        assert isinstance(ddp._comm_hooks[0][1], exact.Exact)
        assert same_everywhere(weights(model))
        ends.append(weights(model))
    assert torch.equal(*ends)


def no_reference_is_kept(rank: int, size: int) -> None:
    ddp = wrapped(build(), bucket_cap_mb=0.02)
    train(ddp, momentum(ddp), range(2), rank)
    held = weakref.ref(ddp), weakref.ref(ddp.module)
    del ddp
    gc.collect()
    assert [x() for x in held] == [None, None]


def refusals(rank: int, size: int) -> None:
    ddp = wrapped(build())
    with pytest.raises(ValueError, match="already has the communication hook Exact"):
        exact_(ddp)
    with pytest.raises(ValueError, match="1 has sparse gradients"):
        exact_(DDP(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 4, sparse=True))))
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params"):
        exact_(DDP(build(), skip_all_reduce_unused_params=True, find_unused_parameters=True))


#: Cases in which sums of more than two terms matter.
BOTH = [averages, buckets_do_not_matter, stays_exact_through_the_switch]
#: Cases that 2 workers cover.
TWO = [averages_in_small_buckets, averages_with_unused_parameters, averages_in_bf16]
ONLY_TWO = [no_reference_is_kept, refusals]


@pytest.mark.timeout(240)  # the hang guard
@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, 2) for case in [*BOTH, *TWO, *ONLY_TWO]),
        *((case, 4) for case in BOTH),
        *(pytest.param(case, 4, marks=pytest.mark.slow) for case in TWO),
    ],
)
def test_in_real_processes(case: Callable[[int, int], None], size: int) -> None:
    in_processes(case, size)


def cuda_cases(rank: int, size: int) -> None:
    """Up to two workers have the bits of plain DDP, whatever streams copies and sums run on."""
    torch.backends.cudnn.deterministic = True
    ends = []
    for is_exact in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).cuda()
        ddp = wrapped(model, is_exact, bucket_cap_mb=5, gradient_as_bucket_view=True)
        optimizer = momentum(model)
        for step in range(6):
            torch.manual_seed(100 * step + rank)
            with torch.autocast("cuda", torch.bfloat16):
                ddp(torch.randn(512, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same_everywhere(weights(model))
        ends.append(weights(model))
    assert torch.equal(*ends)


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("backend", "size"), [("nccl", 1), ("gloo", 2)])
def test_on_cuda(backend: str, size: int) -> None:
    in_processes(cuda_cases, size, backend=backend)
