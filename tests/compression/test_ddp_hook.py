"""The DDP hook, in real processes on gloo: one process group a world size, all methods and cases inside it."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from hook_state import state_cases
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from training import (
    BY_PIECES,
    METHODS,
    build,
    gradients_are_the_aggregators,
    grads,
    loss,
    momentum,
    resumes,
    train,
    weights,
    wrapped,
)

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.compression import (
    DGC,
    QSGD,
    Aggregator,
    NoCompression,
    PowerSGD,
    Signum,
    Simulated,
    TopK,
    compress,
)
from pufferfish.compression.check_compressor import gradients
from pufferfish.distributed.exact import exact_


def real_workers_equal_simulated_ones(name: str, rank: int, size: int) -> None:
    """Bit for bit where nothing is summed on the way; three and more terms have no order that all agree on."""
    method = {"a": TopK(0.1), "*": PowerSGD(1)} if name == "several" else METHODS[name]
    real, simulated = (Aggregator(method, group, smallest=0) for group in (None, Simulated(size)))
    exact = size == 2 or name in BY_PIECES
    for step in range(3):
        given = gradients(size, step)
        here, there = real(given[rank]), simulated.together(given)[rank]
        for n in given[0]:
            close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
            if not exact and name in ("bf16", "fp16"):
                close = {"rtol": 2e-2, "atol": 2e-2}
            torch.testing.assert_close(here[n], there[n], **close, msg=lambda m, n=n: f"{name}, {n}: {m}")
            assert same_everywhere(here[n]), (name, n)
    counts = [(a.meter.handed, a.meter.messages, a.meter.wire_bytes) for a in (real, simulated)]
    assert counts[0] == counts[1]


def no_compression_is_plain_averaging(rank: int, size: int) -> None:
    """The very bits of the exact mode, which lays messages out differently, for two workers; close for more."""
    ends = []
    for wrap in (exact_, lambda ddp: compress(ddp, NoCompression())):
        ddp = DDP(build(), bucket_cap_mb=0.002)
        wrap(ddp)
        train(ddp, momentum(ddp), range(4), rank)
        ends.append(weights(ddp))
    torch.testing.assert_close(*ends, rtol=0 if size == 2 else 1e-5, atol=0 if size == 2 else 1e-6)


def several_backward_passes(rank: int) -> None:
    """Without synchronisation the hook does not run: the sum of two passes goes through it at once."""
    (ddp, hook), (other, _) = (
        wrapped(TopK(0.05), ddp={"gradient_as_bucket_view": view}) for view in (True, False)
    )
    for step in range(3):
        ddp.zero_grad()
        other.zero_grad()
        with ddp.no_sync():
            loss(ddp, 2 * step, rank).backward()
        loss(ddp, 2 * step + 1, rank).backward()
        (loss(other, 2 * step, rank) + loss(other, 2 * step + 1, rank)).backward()
        for n, g in grads(ddp.module).items():
            torch.testing.assert_close(g, grads(other.module)[n])
    assert hook.meter.steps == 3


def several_dtypes(rank: int) -> None:
    """A layer in bf16 has buckets of its own; its memory is in fp32 all the same."""
    model = build()
    model.last.bfloat16()
    model.last.register_forward_pre_hook(lambda m, x: x[0].to(m.weight.dtype))
    ddp = DDP(model, bucket_cap_mb=0.002)
    hook = compress(ddp, TopK(0.05), smallest=0)
    train(ddp, momentum(ddp), range(3), rank)
    assert same_everywhere(weights(ddp))
    assert model.last.weight.dtype == torch.bfloat16
    assert {x["memory"].dtype for x in hook.state_dict()["own"][0].values()} == {torch.float32}


def compiled(rank: int) -> None:
    ends = []
    for wrap in (lambda m: torch.compile(DDP(m), backend="aot_eager"), DDP):
        model = build()
        outer = wrap(model)
        hook = compress(outer, TopK(0.05), smallest=0)
        train(outer, momentum(model), range(3), rank)
        assert hook.meter.steps == 3
        assert "middle.weight" in hook.state_dict()["methods"]
        ends.append(weights(model))
    torch.testing.assert_close(*ends)


def uneven_inputs(rank: int) -> None:
    """A rank that has run out of data answers the others with zeros, and with what its memory holds."""
    for method in (TopK(0.05), QSGD()):
        ddp, _ = wrapped(method)
        with Join([ddp]):
            train(ddp, momentum(ddp), range(2 if rank else 4), rank)
        assert rank or weights(ddp).isfinite().all()


def a_broken_backward_leaves_nothing_behind(rank: int) -> None:
    ddp, hook = wrapped(TopK(0.05))
    optimizer = momentum(ddp)
    train(ddp, optimizer, range(2), rank)
    handle = ddp.module.first.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(ddp, 2, rank).backward()
    handle.remove()
    optimizer.zero_grad()
    assert pf.Switch(rank=6, when=pf.AtStep(0)).step(ddp, optimizer, step=0)  # which wraps it anew
    train(ddp, optimizer, range(2, 4), rank)
    assert same_everywhere(weights(ddp))
    assert hook.meter.steps == 4


def nothing_is_kept(rank: int) -> None:
    ddp, hook = wrapped(PowerSGD(2))
    train(ddp, momentum(ddp), range(2), rank)
    held = weakref.ref(ddp), weakref.ref(ddp.module)
    del ddp, hook
    gc.collect()
    assert [x() for x in held] == [None, None]


def a_static_graph_begins_synchronised(rank: int) -> None:
    """Else refused before anything happens, after wrapping and after a switch; later passes may go without."""
    ddp, hook = wrapped(NoCompression(), ddp={"static_graph": True})
    for switched in (False, True):
        if switched:
            assert pf.Switch(rank=6, when=pf.AtStep(0)).step(ddp, momentum(ddp), step=0)
        steps = hook.meter.steps
        with pytest.raises(ValueError, match="cannot be under no_sync"), ddp.no_sync():
            loss(ddp, 0, rank)
        loss(ddp, 0, rank).backward()
        ddp.zero_grad()
        with ddp.no_sync():
            loss(ddp, 1, rank).backward()
        loss(ddp, 2, rank).backward()
        assert hook.meter.steps == steps + 2
        alone = copy.deepcopy(ddp.module)
        alone.zero_grad()
        (sum(loss(alone, step, r) for step in (1, 2) for r in (0, 1)) / 2).backward()
        for n, g in grads(alone).items():
            torch.testing.assert_close(grads(ddp.module)[n], g)
        ddp.zero_grad()


def refusals(folder: Path) -> None:
    ddp, _ = wrapped()
    with pytest.raises(ValueError, match="compressed already; change its method by use"):
        compress(ddp)
    averaged = DDP(build())
    exact_(averaged)
    with pytest.raises(ValueError, match="hook Exact already"):
        compress(averaged)
    with pytest.raises(ValueError, match="1 has sparse gradients"):
        compress(DDP(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 4, sparse=True))))
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params"):
        compress(DDP(build(), skip_all_reduce_unused_params=True, find_unused_parameters=True))
    with pytest.raises(ValueError, match="QSGD goes without a memory"):
        compress(DDP(build()), QSGD(), memory=True)
    ddp = DDP(build())
    for method in (DGC(), Signum()):
        with pytest.raises(ValueError, match="has a momentum of its own, and so has the SGD"):
            compress(ddp, method, optimizer=momentum(ddp), smallest=0)
    with pytest.raises(ValueError, match="the SGD holds none of this model's parameters"):
        compress(ddp, TopK(), optimizer=momentum(build()))
    with pytest.raises(TypeError, match="not a GradScaler"):
        compress(ddp, TopK(), scaler=True)
    with pytest.raises(ValueError, match=r"give Checkpoint compressor=hook"):
        pf.Checkpoint(folder / "forgotten", wrapped()[0], None).save(step=0)
    with pytest.warns(UserWarning, match=r"PowerSGD\(rank=4\) compresses nothing here"):
        compress(DDP(build()), {"last": PowerSGD(4), "*": TopK()}, smallest=1000)
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="and so has the Adam"):
        compress(ddp, DGC(), optimizer=torch.optim.Adam(ddp.parameters()), smallest=0)
    assert compress(ddp, DGC(), optimizer=plain, smallest=0).method == DGC()


def cases(rank: int, size: int, folder: Path) -> None:
    for name in METHODS:
        real_workers_equal_simulated_ones(name, rank, size)
        gradients_are_the_aggregators(name, rank, size)
        resumes(name, rank)
    resumes("powersgd", rank, find_unused_parameters=True)
    no_compression_is_plain_averaging(rank, size)
    state_cases(rank, size, folder)
    if size == 2:
        gradients_are_the_aggregators("topk", rank, size, static_graph=True)
        gradients_are_the_aggregators("topk", rank, size, gradient_as_bucket_view=True)
        several_backward_passes(rank)
        several_dtypes(rank)
        compiled(rank)
        uneven_inputs(rank)
        a_broken_backward_leaves_nothing_behind(rank)
        nothing_is_kept(rank)
        a_static_graph_begins_synchronised(rank)
        refusals(folder)


@pytest.mark.timeout(240)  # the hang guard
@pytest.mark.parametrize("size", [2, 4])
def test_in_real_processes(size: int, tmp_path: Path) -> None:
    in_processes(cases, size, tmp_path)


def on_so_many(rank: int, size: int, folder: Path) -> None:
    """Saved by two, resumed by four: what all share goes on, memories start empty; an anchor is the model's."""
    ddp, hook = wrapped(PowerSGD(2))
    alone, local = build(), pf.LocalSteps(100)
    with (
        pf.Checkpoint(folder / "ddp", ddp, momentum(ddp), compressor=hook) as checkpoint,
        pf.Checkpoint(folder / "alone", alone, momentum(alone), compressor=local) as other,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)
        if size == 2:
            train(ddp, momentum(ddp), range(3), rank)
            checkpoint.save(step=3)
            local.start(alone)
            train(alone, momentum(alone), range(2), rank)
            local.step(alone)
            local.sync(alone)
            other.save(step=3)
            return
        local.start(alone)
        for at in (checkpoint.resume(), other.resume()):
            assert at is not None
            assert any(text.startswith("compressor (saved by 2 ranks, now 4)") for text in at.reset)
    state = hook.state_dict()
    assert state["steps"] == 3
    assert state["shared"]["middle.weight"]["Q"].any()
    assert state["own"] == [{}]
    before = weights(alone)
    local.updates = 1  # as if each had made an update that changed nothing
    local.start(alone)
    local.sync(alone)
    torch.testing.assert_close(weights(alone), before)


@pytest.mark.timeout(120)
def test_another_number_of_workers(tmp_path: Path) -> None:
    for size in (2, 4):
        in_processes(on_so_many, size, tmp_path)
