"""The guard against losses and gradients that are not finite, in one process and in two."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes
from pufferfish.distributed.finite_guard import FiniteGuard


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def backward(model: nn.Module, poison: float = 0.0) -> Tensor:
    loss: Tensor = model(torch.ones(2, 64)).sum() + poison
    loss.backward()
    return loss


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_each_part_is_looked_at(bad: float) -> None:
    model = build()
    guard = FiniteGuard(model, on_bad="skip", limit=99)
    loss = backward(model)
    assert guard(loss)
    assert guard()
    with pytest.warns(RuntimeWarning, match=r"call 3: the loss is not finite; update skipped"):
        assert not guard(torch.tensor([1.0, bad]))
    for name, p in model.named_parameters():
        assert p.grad is not None
        p.grad.view(-1)[-1] = bad
        with pytest.warns(RuntimeWarning, match=f"the gradient of {name} is not finite; update skipped"):
            assert not guard(loss)
        p.grad.view(-1)[-1] = 0.0
    assert guard(loss)
    assert (guard.calls, guard.skipped, guard.in_a_row) == (8, 5, 0)


def test_large_but_finite_is_fine() -> None:
    """The squares of these overflow; a norm would cry wolf."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).half(), nn.Linear(4, 4).double()])
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.finfo(p.dtype).max)
    assert FiniteGuard(model)()
    model[2].weight.grad[0, 0] = math.nan  # type: ignore[index]
    with pytest.raises(FloatingPointError, match=r"call 1: the gradient of 2\.weight is not finite"):
        FiniteGuard(model)()


def test_missing_empty_sparse_and_complex_gradients() -> None:
    model = nn.Module()
    model.table = nn.Embedding(5, 3, sparse=True)
    model.unused = nn.Linear(2, 2)
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.empty.grad = torch.empty(0, 3)
    model.complex.grad = torch.ones(2, dtype=torch.complex64)
    model.table(torch.tensor([1, 4, 4])).sum().backward()
    assert FiniteGuard(model)()
    model.complex.grad[1] = complex(0, math.inf)
    with pytest.raises(FloatingPointError, match="of complex is"):
        FiniteGuard(model)()
    model.complex.grad = None
    model.table.weight.grad._values()[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"of table\.weight is"):
        FiniteGuard(model)()


def test_the_limit_counts_in_a_row_and_survives_a_restart() -> None:
    model, bad, good = build(), torch.tensor(math.nan), torch.tensor(1.0)
    guard = FiniteGuard(model, on_bad="skip", limit=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [guard(x) for x in (bad, bad, good, bad, bad)] == [False, False, True, False, False]
        after = FiniteGuard(model, on_bad="skip", limit=3)
        after.load_state_dict(json.loads(json.dumps(guard.state_dict())))
        for each in (guard, after):
            with pytest.raises(FloatingPointError, match=r"call 6: the loss .* 3 times in a row"):
                each(bad)
            assert each.skipped == 4


def test_a_compiled_model_and_one_that_switched_are_named_as_they_are_now() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = FiniteGuard(torch.compile(model, backend="eager"))
    backward(model)
    assert guard()
    model.zero_grad()
    assert pf.Switch(rank=0.25, keep=["2"], when=pf.AtEpoch(0)).step(model, optimizer, epoch=0)
    backward(model)
    assert guard()
    model[0].up.bias.grad[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"call 3: the gradient of 0\.up\.bias is not finite"):
        guard()


def test_skipping_leaves_model_and_optimizer_as_they_were() -> None:
    """An update that is left out: the run without the bad batch ends in the same bits."""
    ends = []
    for losses in ([0.0, 0.0, 0.0], [0.0, math.nan, 0.0, 0.0]):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        guard = FiniteGuard(model, on_bad="skip")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for poison in losses:
                if guard(backward(model, poison)):
                    optimizer.step()
                optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)


def test_a_gradient_scaler_lowers_its_scale() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    guard = FiniteGuard(model, on_bad="skip")
    for factor in (1.0, 1e38):  # times 4 is too much for fp32
        loss = model(torch.ones(2, 64)).square().sum() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if guard():
                scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (guard.skipped, scaler.get_scale()) == (1, 2.0)


@pytest.mark.gpu
def test_on_cuda() -> None:
    model = nn.ModuleList([build(), build().bfloat16()]).cuda()
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.finfo(p.dtype).max)
    assert FiniteGuard(model)(torch.tensor(1.0, device="cuda"))
    model[1][2].bias.grad[-1] = math.nan
    with pytest.raises(
        FloatingPointError, match=r"the loss is not finite, the gradient of 1\.2\.bias is not"
    ):
        FiniteGuard(model)(torch.tensor(math.inf))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="on_bad='stop' is neither"):
        FiniteGuard(build(), on_bad="stop")  # type: ignore[arg-type]


def a_loss_on_one_worker(rank: int, size: int) -> None:
    """The loss is bad on one worker; adding NaN does not change any gradient."""
    bad = math.nan if rank == 1 else 0.0
    ddp = DDP(build())
    guard = FiniteGuard(ddp, on_bad="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert guard(backward(ddp))
        assert not guard(backward(ddp, bad))
        assert guard(backward(ddp))
    assert [str(w.message) for w in caught] == (
        [] if rank else ["FiniteGuard, call 2: the loss is not finite on rank 1; update skipped"]
    )


def an_averaged_gradient(rank: int, size: int) -> None:
    """A bad input on one worker makes the averaged gradients of all workers bad."""
    ddp = DDP(build())
    loss = ddp(torch.full((2, 64), math.nan if rank == 1 else 0.0)).sum()
    loss.backward()
    with pytest.raises(FloatingPointError) as raised:
        FiniteGuard(ddp)(loss)
    assert str(raised.value).startswith(
        "FiniteGuard, call 1: the loss is not finite on rank 1, the gradient of 0.weight, 2.weight "
        "is not finite on rank 0, 1;"
    )


def a_gradient_under_no_sync(rank: int, size: int) -> None:
    """Before the average a gradient is bad on one worker only; all of them raise."""
    ddp = DDP(build())
    with ddp.no_sync():
        backward(ddp)
    if rank == 0:
        ddp.module[2].bias.grad[1] = math.inf
    with pytest.raises(FloatingPointError, match=r"of 2\.bias is not finite on rank 0;"):
        FiniteGuard(ddp)()


def a_shard_of_a_rebuilt_model(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))

    def shard(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh)

    model = build()
    shard(model)
    guard = FiniteGuard(model)
    switch = pf.Switch(rank=0.25, when=pf.AtStep(0))
    new, _ = switch.rebuild(model, None, build=build, shard=shard, step=0)
    loss = backward(new)
    assert guard(loss)
    if rank == 1:
        new.get_parameter("0.up.weight").grad.to_local()[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"the gradient of 0\.up\.weight is not finite on rank 1"):
        guard(loss)


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize(
    "case",
    [
        a_loss_on_one_worker,
        an_averaged_gradient,
        a_gradient_under_no_sync,
        a_shard_of_a_rebuilt_model,
    ],
)
def test_all_workers_get_the_same_answer(case: Callable[[int, int], None]) -> None:
    in_processes(case, 2)
