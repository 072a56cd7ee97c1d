"""SAM against its two passes written out, alone and with two real workers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optimizer_checks
import pytest
import torch
import torch.nn.functional as F
from optimizer_checks import batch, build, equal, update
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from processes import in_processes, same_everywhere
from pufferfish.lab.rivals import LARS, SAM

RHO = 0.1


def sgd(model: nn.Module) -> SAM:
    return SAM(optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model, rho=RHO)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, next(model.parameters()).dtype)
    return F.cross_entropy(model(x), y)


def second_gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """At w + ρ g/‖g‖, on a copy; the first pass alone changes the statistics of `model`."""
    params = list(model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), params)
    norm = torch.cat([g.flatten() for g in grads]).norm()
    there = copy.deepcopy(model)
    for p, g in zip(there.parameters(), grads, strict=True):
        p.data += RHO * g / norm
    return list(torch.autograd.grad(F.cross_entropy(there(x), y), list(there.parameters())))


@pytest.mark.parametrize(
    "base",
    [
        lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda params: optim.AdamW(params, lr=0.01),
        lambda params: LARS(params, lr=0.2, trust=0.05),
    ],
)
def test_equals_two_passes_written_out(base: Callable[[Any], optim.Optimizer]) -> None:
    model, plain = build(torch.float64), build(torch.float64)
    sam, theirs = SAM(base(model.parameters()), model, rho=RHO), base(plain.parameters())
    for step in range(4):
        loss_of(model, step).backward()
        with sam.perturbed():
            loss_of(model, step).backward()
        sam.step()
        sam.zero_grad()
        found = second_gradients(plain, *batch(step, torch.float64))
        for p, g in zip(plain.parameters(), found, strict=True):
            p.grad = g
        theirs.step()
        for (name, x), y in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=name)  # statistics too


def test_closure_is_both_passes() -> None:
    one, other = build(), build()
    sam, same = sgd(one), sgd(other)
    for step in range(3):
        update(one, sam, step)
        loss_of(other, step).backward()
        with same.perturbed():
            loss_of(other, step).backward()
        same.step()
        same.zero_grad()
    equal(one, other)


@pytest.mark.parametrize("fails", [False, True])
def test_weights_and_statistics_come_back_bit_for_bit(fails: bool) -> None:
    model = build()
    sam = sgd(model)
    loss_of(model, 0).backward()
    before = copy.deepcopy(model.state_dict())
    try:
        with sam.perturbed():
            assert all(p.grad is None for p in model.parameters())
            assert any(not torch.equal(x, before[name]) for name, x in model.named_parameters())
            loss_of(model, 1).backward()
            if fails:
                raise KeyError
    except KeyError:
        with pytest.raises(ValueError, match="second pass"):
            sam.step()
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert before["1.num_batches_tracked"] == 1


def test_no_gradient_at_all_stays_where_it_is() -> None:
    p = nn.Parameter(torch.ones(3))
    sam = SAM(optim.SGD([p], lr=1.0), nn.Module())
    p.grad = torch.zeros(3)
    with sam.perturbed():
        assert torch.equal(p, torch.ones(3))


def test_one_autocast_around_both_passes() -> None:
    """Autocast keeps bf16 copies of the weights for the second use; they are those of the first."""
    one, other = build(), build()
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(one, 0).backward()
        with sgd(one).perturbed():
            loss_of(one, 0).backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(other, 0).backward()
    with sgd(other).perturbed(), torch.autocast("cpu", torch.bfloat16):
        loss_of(other, 0).backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_grad_scaler_is_refused() -> None:
    model = build()
    sam, before = sgd(model), copy.deepcopy(model.state_dict())
    for first in (False, True):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model.eval(), 0)).backward()
        with sam.perturbed():
            scaler.scale(loss_of(model, 0)).backward()
        if first:
            scaler.unscale_(sam)
        with pytest.raises(ValueError, match="GradScaler"):
            scaler.step(sam)
        sam.zero_grad()
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    off = torch.amp.GradScaler("cpu", enabled=False)
    loss_of(model, 0).backward()
    with sam.perturbed():
        loss_of(model, 0).backward()
    off.step(sam)


def test_wrong_order_is_told() -> None:
    model = build()
    sam = sgd(model)
    with pytest.raises(ValueError, match="backward"), sam.perturbed():
        pass
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="perturbed"):
        sam.step()
    with pytest.raises(ValueError, match="rho=0"):
        SAM(sam.optimizer, model, rho=0)
    with pytest.raises(TypeError, match="Linear is not"):
        SAM(nn.Linear(1, 1), model)  # type: ignore[arg-type]


def test_groups_hooks_and_schedules_are_those_of_the_optimizer() -> None:
    model = build()
    sam = sgd(model)
    seen: list[Any] = []
    sam.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = optim.lr_scheduler.StepLR(sam, 1, 0.5)
        for step in range(2):
            update(model, sam, step)
            schedule.step()
    assert sam.param_groups is sam.optimizer.param_groups
    assert sam.param_groups[0]["lr"] == 0.0025
    assert seen == [sam.optimizer] * 2
    sam.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(sam.optimizer.param_groups) == 2


def test_follows_a_switch_and_back() -> None:
    optimizer_checks.follows_a_switch(sgd, {"momentum_buffer"})


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    optimizer_checks.resumes(sgd, tmp_path)


def test_is_copied() -> None:
    optimizer_checks.is_copied(sgd)


def test_trains_in_bf16() -> None:
    optimizer_checks.trains_in_bf16(sgd)


def two_workers(rank: int, size: int) -> None:
    """Each climbs by its own gradient and sends only the second; BatchNorm as DDP has it, rank 0's."""
    model, plain = build(), build()
    ddp = DDP(model)
    sent: list[int] = []

    def count(group, bucket):  # type: ignore[no-untyped-def]  # DDP wants to read annotations
        sent.append(1)
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(None, count)
    sam = SAM(optim.SGD(model.parameters(), lr=0.1, momentum=0.9), ddp, rho=RHO)
    theirs = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = (part.chunk(size) for part in batch(step))
        if step % 2:  # both ways to write it

            def closure(x: Tensor = x[rank], y: Tensor = y[rank]) -> Tensor:
                loss = F.cross_entropy(ddp(x), y)
                loss.backward()
                return loss

            sam.step(closure)
        else:
            with sam.first_pass():
                F.cross_entropy(ddp(x[rank]), y[rank]).backward()
            assert len(sent) == step
            with sam.perturbed():
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
def test_two_workers(tmp_path: Path) -> None:
    in_processes(two_workers, 2)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """Both passes and the step in one graph."""
    one, other = build().cuda(), build().cuda()
    x, y = (part.cuda() for part in batch(0))

    def step(model: nn.Module, sam: SAM) -> None:
        sam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with sam.perturbed():
            F.cross_entropy(model(x), y).backward()
        sam.step()

    captured, eager = sgd(one), sgd(other)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step(one, captured)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(one, captured)
    graph.replay()
    for _ in range(4):
        step(other, eager)
    for name, p in one.state_dict().items():
        torch.testing.assert_close(p, other.state_dict()[name], rtol=1e-3, atol=1e-4, msg=name)
