"""The DDP hook, in real processes on gloo: every method, and every way DDP is used."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hook_state
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from training import (
    COLLECTIVES,
    GROUPS,
    build,
    gradients_are_those_of_simulated_workers,
    grads,
    loss,
    momentum,
    own_gradients,
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
    Accordion,
    BFloat16,
    Engine,
    Float16,
    NoCompression,
    PowerSGD,
    Settings,
    Signum,
    Simulated,
    TopK,
    compress,
)
from pufferfish.distributed.exact import exact_


def no_compression_is_plain_averaging(rank: int, size: int, folder: Path) -> None:
    """Bit-identical to the exact mode, which lays out messages differently, for two workers; close for more."""
    ends = []
    for wrap in (exact_, lambda ddp: compress(ddp, NoCompression())):
        ddp = DDP(build(), bucket_cap_mb=0.002)
        wrap(ddp)
        train(ddp, momentum(ddp), range(4), rank)
        ends.append(weights(ddp))
    torch.testing.assert_close(*ends, rtol=0 if size == 2 else 1e-5, atol=0 if size == 2 else 1e-6)


def several_backward_passes(rank: int, size: int, folder: Path) -> None:
    """Without synchronisation the hook does not run: it averages the sum of both passes."""
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


def several_dtypes(rank: int, size: int, folder: Path) -> None:
    """A layer in bf16 has its own buckets; its error feedback is in fp32."""
    model = build()
    model.last.bfloat16()
    model.last.register_forward_pre_hook(lambda m, x: x[0].to(m.weight.dtype))
    ddp = DDP(model, bucket_cap_mb=0.002)
    hook = compress(ddp, TopK(0.05), settings=Settings(smallest=0))
    train(ddp, momentum(ddp), range(3), rank)
    assert same_everywhere(weights(ddp))
    assert model.last.weight.dtype == torch.bfloat16
    assert {x["error"].dtype for x in hook.state_dict()["own"].values()} == {torch.float32}


def compiled(rank: int, size: int, folder: Path) -> None:
    ends = []
    for wrap in (lambda m: torch.compile(DDP(m), backend="aot_eager"), DDP):
        model = build()
        outer = wrap(model)
        hook = compress(outer, TopK(0.05), settings=Settings(smallest=0))
        train(outer, momentum(model), range(3), rank)
        assert hook.meter.steps == 3
        assert "middle.weight" in hook.state_dict()["methods"]
        ends.append(weights(model))
    torch.testing.assert_close(*ends)


def accordion_without_error_feedback_sees_the_learning_rate(rank: int, size: int, folder: Path) -> None:
    ddp = DDP(build())
    optimizer = momentum(ddp, lr=0.1)
    hook = compress(
        ddp, Accordion(BFloat16(), Float16(), every=1), optimizer=optimizer, settings=Settings(smallest=0)
    )
    light = []
    for lr in (0.1, 0.1, 0.1, 0.01, 0.01):
        optimizer.param_groups[0]["lr"] = lr
        loss(ddp, 0, rank).backward()  # the same gradient again, so that only the rate changes the choice
        optimizer.zero_grad()
        light.append(bool(hook.state_dict()["shared"]["middle.weight"]["light"]))
    assert light == [True, False, False, True, False]


def uneven_inputs(rank: int, size: int, folder: Path) -> None:
    """A worker that has run out of data sends zeros, and its error feedback."""
    for method in (TopK(0.05), QSGD()):
        ddp, _ = wrapped(method)
        reference = Simulated(Settings(method, smallest=0), 2)
        with Join([ddp]):
            for step in range(2 if rank else 4):
                ddp.zero_grad()
                loss(ddp, step, rank).backward()
                given = [own_gradients(step, worker) for worker in (0, 1)]
                if step >= 2:
                    given[1] = {name: torch.zeros_like(g) for name, g in given[1].items()}
                expected = reference.average(given)[rank]
                for name, g in grads(ddp.module).items():
                    torch.testing.assert_close(g, expected[name])


def a_failed_backward_pass_leaves_nothing_behind(rank: int, size: int, folder: Path) -> None:
    ddp, hook = wrapped(TopK(0.05))
    optimizer = momentum(ddp)
    train(ddp, optimizer, range(2), rank)
    handle = ddp.module.first.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(ddp, 2, rank).backward()
    handle.remove()
    optimizer.zero_grad()
    assert pf.Switch(rank=6, when=pf.AtStep(0)).step(ddp, optimizer, step=0)  # which wraps it again
    train(ddp, optimizer, range(2, 4), rank)
    assert same_everywhere(weights(ddp))
    assert hook.meter.steps == 4


def a_deleted_model_is_freed(rank: int, size: int, folder: Path) -> None:
    ddp, hook = wrapped(PowerSGD(2))
    train(ddp, momentum(ddp), range(2), rank)
    held = weakref.ref(ddp), weakref.ref(ddp.module)
    del ddp, hook
    gc.collect()
    assert [x() for x in held] == [None, None]


def a_static_graph_begins_synchronised(rank: int, size: int, folder: Path) -> None:
    """After wrapping and after a switch; later passes need not be synchronised."""
    ddp, hook = wrapped(NoCompression(), ddp={"static_graph": True})
    for switched in (False, True):
        if switched:
            assert pf.Switch(rank=6, when=pf.AtStep(0)).step(ddp, momentum(ddp), step=0)
        steps = hook.meter.steps
        loss(ddp, 0, rank).backward()
        ddp.zero_grad()
        with ddp.no_sync():
            loss(ddp, 1, rank).backward()
        loss(ddp, 2, rank).backward()
        assert hook.meter.steps == steps + 2
        single = copy.deepcopy(ddp.module)
        single.zero_grad()
        (sum(loss(single, step, r) for step in (1, 2) for r in (0, 1)) / 2).backward()
        for n, g in grads(single).items():
            torch.testing.assert_close(grads(ddp.module)[n], g)
        ddp.zero_grad()


def a_copy_is_plain_ddp(rank: int, size: int, folder: Path) -> None:
    """Before and after a switch; and it can be compressed anew."""
    ddp, hook = wrapped(PowerSGD(1))
    for switched in (False, True):
        if switched:
            assert pf.Switch(rank=6, when=pf.AtStep(0)).step(ddp, momentum(ddp), step=0)
        copied, plain = copy.deepcopy(ddp), DDP(copy.deepcopy(ddp.module))
        for net in (copied, plain, ddp):
            loss(net, 0, rank).backward()
        for n, g in grads(plain.module).items():
            assert torch.equal(grads(copied.module)[n], g)
        assert compress(copied, PowerSGD(1)).meter.steps == 0
        assert hook.meter.steps == 1 + switched
        ddp.zero_grad()


def refusals(rank: int, size: int, folder: Path) -> None:
    ddp, _ = wrapped()
    with pytest.raises(ValueError, match="already compressed; call use"):
        compress(ddp)
    _, hook = wrapped(TopK(), scope="global")
    with pytest.raises(
        ValueError, match='PowerSGD compresses every tensor separately; scope="global" is for'
    ):
        hook.use(PowerSGD(1))
    with pytest.raises(ValueError, match=r"^QSGD works without error feedback"):
        hook.use(QSGD(), error_feedback=True)
    averaged = DDP(build())
    exact_(averaged)
    with pytest.raises(ValueError, match="already has the communication hook Exact"):
        compress(averaged)
    with pytest.raises(ValueError, match="1 has sparse gradients"):
        compress(DDP(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 4, sparse=True))))
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params"):
        compress(DDP(build(), skip_all_reduce_unused_params=True, find_unused_parameters=True))
    with pytest.raises(ValueError, match="QSGD works without error feedback"):
        compress(DDP(build()), QSGD(), settings=Settings(error_feedback=True))
    ddp = DDP(build())
    for method in (DGC(), Signum()):
        with pytest.raises(ValueError, match="has its own momentum, and so does the SGD"):
            compress(ddp, method, optimizer=momentum(ddp), settings=Settings(smallest=0))
    with pytest.raises(ValueError, match="the SGD holds none of this model's parameters"):
        compress(ddp, TopK(), optimizer=momentum(build()))
    with pytest.raises(TypeError, match="not a GradScaler"):
        compress(ddp, TopK(), settings=Settings(scaler=True))
    with pytest.raises(ValueError, match="pass the method as the second argument"):
        compress(ddp, settings=Settings(TopK()))
    with pytest.raises(ValueError, match="pass compressor=hook"):
        pf.Checkpoint(folder / "forgotten", wrapped()[0], None).save(step=0)
    with pytest.warns(UserWarning, match=r"PowerSGD\(rank=4, .*\) compresses nothing here"):
        compress(DDP(build()), {"last": PowerSGD(4), "*": TopK()}, settings=Settings(smallest=1000))
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="and so does the Adam"):
        compress(ddp, DGC(), optimizer=torch.optim.Adam(ddp.parameters()), settings=Settings(smallest=0))
    assert compress(ddp, DGC(), optimizer=plain, settings=Settings(smallest=0)).method == DGC()


def a_different_model_raises_on_all(rank: int, size: int, folder: Path) -> None:
    """Instead of an average of other parameters, or an abort inside gloo. Afterwards the engine goes on."""
    engine = Engine(Settings(PowerSGD(2), smallest=0))
    same = {"a": torch.ones(8, 8), "b": torch.full((8,), float(rank))}
    others: list[tuple[dict[str, torch.Tensor], str, str]] = [
        ({"a": same["a"], "c": same["b"]}, "b is float32 of shape [8] on this worker and missing on another",
         "c is float32 of shape [8] on this worker and missing on another"),
        (same | {"b": torch.ones(9)}, "b is float32 of shape [8] on this worker and float32 of shape [9] on another",
         "b is float32 of shape [9] on this worker and float32 of shape [8] on another"),
        (same | {"a": torch.ones(8, 8).double()}, "a is float32 of shape [8, 8]", "a is float64 of shape [8, 8]"),
        ({"a": same["a"]}, "b is float32 of shape [8] on this worker and missing", "b is missing on this worker"),
        ({}, "a is float32 of shape [8, 8] on this worker and missing", "a is missing on this worker"),
    ]  # fmt: skip
    for other, *texts in others:
        with pytest.raises(ValueError, match="average the same model") as raised:
            engine.average(other if rank else same)
        assert str(raised.value).startswith(f"Engine.average: {texts[rank]}")
    assert engine.steps == engine.meter.messages == 0
    for _ in range(2):
        assert torch.equal(engine.average(same)["b"], torch.full((8,), 0.5))
    plain = Simulated(Settings(PowerSGD(2), smallest=0), 2)
    for _ in range(2):
        plain.average([same, same])
    assert engine.meter.collective_bytes == plain.meter.collective_bytes  # the comparison is not counted
    assert engine.meter.messages == plain.meter.messages


CASES = (
    no_compression_is_plain_averaging,
    hook_state.resumes_from_a_checkpoint,
    hook_state.unused_parameters_keep_their_error_feedback,
    several_backward_passes,
    several_dtypes,
    a_different_model_raises_on_all,
    compiled,
    accordion_without_error_feedback_sees_the_learning_rate,
    uneven_inputs,
    a_failed_backward_pass_leaves_nothing_behind,
    a_deleted_model_is_freed,
    a_static_graph_begins_synchronised,
    a_copy_is_plain_ddp,
    refusals,
)


def bad_steps_leave_no_trace(rank: int, size: int, folder: Path) -> None:
    hook_state.a_bad_first_bucket_leaves_no_trace(rank, size, {})


def every_method(rank: int, size: int, case: Callable[..., None], names: tuple[str, ...]) -> None:
    for name in names:
        case(rank, size, name)


@pytest.mark.timeout(240)  # against deadlocks
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("case", [gradients_are_those_of_simulated_workers, resumes])
def test_every_method(case: Callable[..., None], group: str) -> None:
    in_processes(every_method, 2, case, GROUPS[group])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [gradients_are_those_of_simulated_workers, resumes])
def test_every_collective_with_four_workers(case: Callable[..., None]) -> None:
    """Sums of more than two terms, and shares of several owners."""
    in_processes(every_method, 4, case, COLLECTIVES)


def ddp_options(rank: int, size: int, case: Callable[..., None], options: dict[str, Any]) -> None:
    case(rank, size, "topk", **options)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("case", "option"),
    [
        (gradients_are_those_of_simulated_workers, "static_graph"),
        (gradients_are_those_of_simulated_workers, "gradient_as_bucket_view"),
        (resumes, "find_unused_parameters"),
    ],
)
def test_options_of_ddp(case: Callable[..., None], option: str) -> None:
    in_processes(ddp_options, 2, case, {option: True})


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [*CASES, bad_steps_leave_no_trace, *hook_state.TWO_WORKERS])
def test_two_workers(case: Callable[..., None], tmp_path: Path) -> None:
    in_processes(case, 2, tmp_path)


def saved_by_two_resumed_by_four(rank: int, size: int, folder: Path) -> None:
    """Shared state is kept, error feedback starts empty; the anchor of local steps is the model's."""
    ddp, hook = wrapped(PowerSGD(2))
    single, local = build(), pf.LocalSteps(100)
    with (
        pf.Checkpoint(folder / "ddp", ddp, momentum(ddp), compressor=hook) as checkpoint,
        pf.Checkpoint(folder / "single", single, momentum(single), compressor=local) as other,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)
        if size == 2:
            train(ddp, momentum(ddp), range(3), rank)
            checkpoint.save(step=3)
            local.start(single)
            train(single, momentum(single), range(2), rank)
            local.step(single)
            local.sync(single)
            other.save(step=3)
            return
        local.start(single)
        feedback = "error feedback of the compressor (saved by 2 workers, now 4)"
        at, later = checkpoint.resume(), other.resume()
        assert at is not None
        assert feedback in at.reset
        assert later is not None  # single workers have trained models of their own
        assert f"models and optimizers of all workers but worker 0, and {feedback}" in later.reset
    state = hook.state_dict()
    assert state["steps"] == 3
    assert state["shared"]["middle.weight"]["Q"].any()
    assert state["own"] == {}
    before = weights(single)
    local.start(single)
    local.step(single)  # as if each worker had made an update that changed nothing
    local.sync(single)
    torch.testing.assert_close(weights(single), before)


@pytest.mark.timeout(120)
def test_another_number_of_workers(tmp_path: Path) -> None:
    for size in (2, 4):
        in_processes(saved_by_two_resumed_by_four, size, tmp_path)
