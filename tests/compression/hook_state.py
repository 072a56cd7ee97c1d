"""Cases of the DDP hook's state: through files, bad steps, other methods and the switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import (
    build,
    grads,
    loss,
    momentum,
    train,
    weights,
    wrapped,
)

import pufferfish as pf
from processes import same_everywhere
from pufferfish.compression import (
    BFloat16,
    NoCompression,
    PowerSGD,
    Settings,
    SignSGD,
    TopK,
    compress,
)


def resumes_from_a_checkpoint(rank: int, size: int, folder: Path) -> None:
    """Through files, across a switch: every worker finds its own error feedback."""
    ends = []
    for stop, name in ((6, "straight"), (4, "stopped"), (6, "stopped")):
        ddp, hook = wrapped(TopK(0.05))
        optimizer, switch = momentum(ddp), pf.Switch(rank=4, when=pf.AtStep(2))
        with pf.Checkpoint(
            folder / name, ddp, optimizer, switch=switch, compressor=hook, every=1
        ) as checkpoint:
            at = checkpoint.resume()
            for step in range(at.position["step"] if at else 0, stop):
                switch.step(ddp, optimizer, step=step)
                train(ddp, optimizer, range(step, step + 1), rank)
                checkpoint.step(step=step + 1)
        assert any(isinstance(m, pf.layers.LowRank) for m in ddp.modules())
        ends.append(weights(ddp))
    assert torch.equal(ends[0], ends[2])


def unused_parameters_keep_their_error_feedback(rank: int, size: int, folder: Path) -> None:
    """Used by one worker, by none, by all: what DDP ignores stays in the error feedback."""
    ddp, hook = wrapped(TopK(0.05), maybe=True)
    name = "maybe.weight"
    total = torch.zeros(24, 24)  # all gradients less what was applied
    for step, users in enumerate([(0, 1), (), (0,), (), (1,)]):
        ddp.zero_grad()
        loss(ddp, step, rank, maybe=rank in users).backward()
        own = build(maybe=True)
        loss(own, step, rank, maybe=rank in users).backward()
        g = own.maybe.weight.grad
        total += 0 if g is None else g
        applied = ddp.module.maybe.weight.grad
        assert (applied is None) == (not users)
        total -= 0 if applied is None else applied
        both = torch.stack([total, hook.state_dict()["own"][name]["error"]])
        dist.all_reduce(both)
        torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-6)


def through_the_switch(rank: int, size: int, folder: Path) -> None:
    """The hook stays; state of replaced parameters is dropped, the rest is kept."""
    ddp, hook = wrapped(PowerSGD(rank=1), smallest=100)
    optimizer = momentum(ddp)
    train(ddp, optimizer, range(2), rank)
    before = hook.state_dict()["own"]
    assert pf.Switch(rank=6, when=pf.AtStep(0), keep=["first"]).step(ddp, optimizer, step=0)
    train(ddp, optimizer, range(2, 4), rank)
    assert ddp._comm_hooks[0][1] is hook
    after = hook.state_dict()["own"]
    assert "middle.weight" in before
    assert "middle.weight" not in after
    assert {"first.weight", "middle.down.weight"} <= after.keys()
    assert same_everywhere(weights(ddp))


class Named(torch.optim.SGD):
    """With SGD's own `step`."""


class Normalised(torch.optim.SGD):
    """Like LARS, it has a `step` of its own."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


def error_feedback_follows_the_units(rank: int, size: int, folder: Path) -> None:
    """Learning rate ÷ 10: error feedback × 10. Loss scale × 4: × 4. Where the update has a size of its own, the latter."""
    for kind, factor in ((torch.optim.SGD, 40.0), (Named, 40.0), (torch.optim.Adam, 4.0), (Normalised, 4.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        ddp = DDP(build())
        optimizer = kind(ddp.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 9)  # wraps its step
        hook = compress(ddp, TopK(0.05), optimizer=optimizer, settings=Settings(scaler=scaler, smallest=0))
        scaler.scale(loss(ddp, 0, rank)).backward()
        before = hook.state_dict()["own"]["middle.weight"]["error"]
        optimizer.param_groups[0]["lr"] = 0.01
        scaler.update(4.0)
        ddp.zero_grad()
        (0 * loss(ddp, 0, rank)).backward()  # zeros: error feedback waits
        after = hook.state_dict()["own"]["middle.weight"]["error"]
        torch.testing.assert_close(after, before * factor)


def methods_are_changed_on_all_workers(rank: int, size: int, folder: Path) -> None:
    ddp, hook = wrapped(PowerSGD(rank=1))
    optimizer = momentum(ddp)
    for step, method in enumerate([TopK(0.1), {"first": SignSGD(), "*": BFloat16()}, NoCompression()]):
        train(ddp, optimizer, range(step, step + 1), rank)
        hook.use(method)
    train(ddp, optimizer, range(3, 5), rank)
    assert hook.state_dict()["own"] == {}
    assert same_everywhere(weights(ddp))
    with pytest.raises(RuntimeError, match="differ from rank 0 in the compression's method"):
        hook.use(TopK(0.2 if rank else 0.1))
    assert hook.method == NoCompression()
    with pytest.raises((ValueError, RuntimeError), match="matches no parameter"):
        hook.use({"*": TopK()} if rank else {"nowhere": TopK()})
    train(ddp, optimizer, range(5, 6), rank)


def through_a_switch_and_another_method(rank: int, size: int, options: dict[str, Any]) -> None:
    """Parameters are replaced after the buckets and owners are known; the next pass arranges them again."""
    ddp, hook = wrapped(TopK(0.05), **options)
    optimizer = momentum(ddp)
    train(ddp, optimizer, range(3), rank)
    assert pf.Switch(rank=4, when=pf.AtStep(0)).step(ddp, optimizer, step=0)
    train(ddp, optimizer, range(3, 6), rank)
    hook.use(NoCompression())
    train(ddp, optimizer, range(6, 9), rank)
    assert same_everywhere(weights(ddp))
    assert hook.meter.steps == 9


def a_bad_first_bucket_leaves_no_trace(rank: int, size: int, options: dict[str, Any]) -> None:
    """NaN on one worker, in the part that is sent first: all gradients are NaN on all, all state is as before."""
    ddp, hook = wrapped(PowerSGD(2), **options)
    for step in range(2):
        loss(ddp, step, rank).backward()
    before = hook.state_dict()
    handle = ddp.module.last.weight.register_hook(lambda g: g * float("nan")) if rank == 1 else None
    ddp.zero_grad()
    loss(ddp, 2, rank).backward()
    assert all(g.isnan().all() for g in grads(ddp.module).values())
    after = hook.state_dict()
    for part in ("shared", "own"):
        assert before[part].keys() == after[part].keys()
        for name, state in before[part].items():
            assert all(torch.equal(x, after[part][name][key]) for key, x in state.items()), name
    if handle is not None:
        handle.remove()
    ddp.zero_grad()
    loss(ddp, 3, rank).backward()
    assert all(g.isfinite().all() for g in grads(ddp.module).values())


#: Cases that four workers show no better than two.
TWO_WORKERS = (
    through_the_switch,
    error_feedback_follows_the_units,
    methods_are_changed_on_all_workers,
)
