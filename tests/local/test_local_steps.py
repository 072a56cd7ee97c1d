"""Local steps in one process: state, replaced parameters, invalid arguments."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from local_workers import adamw, batch, build, close, diloco, sequential, sgd, train
from torch import nn, optim

import pufferfish as pf
from nested import equal
from pufferfish.compression import DGC, BlockInt8, PowerSGD, SignSGD, TopK
from pufferfish.local.local_steps import LocalSteps


def test_one_worker_is_lookahead() -> None:
    model = build()
    local, optimizer = LocalSteps(3, outer=diloco), adamw(model.parameters())
    local.start(model)
    assert train(local, model, optimizer, range(7), 0) == [3, 6]
    assert local.sync(model)
    assert not local.sync(model)
    other = sequential(1, 3, 6, adamw, lr=0.7, momentum=0.9)
    local, model = LocalSteps(3, outer=diloco), build()
    local.start(model)
    train(local, model, adamw(model.parameters()), range(6), 0)
    close(model, other)


def test_buffers_that_cannot_be_averaged() -> None:
    model = build()
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    local = LocalSteps(1)
    local.start(model)
    assert list(local.state_dict()["buffers"]) == ["1.running_mean", "1.running_var"]
    model.cache = torch.ones(5)
    local.step(model)
    assert local.lost == 0


def test_compiled_models_keep_their_names() -> None:
    model = build()
    local = LocalSteps(2)
    local.start(torch.compile(model, backend="eager"))
    assert local.state_dict()["anchor"].keys() == dict(model.named_parameters()).keys()
    local.step(model)


@pytest.mark.gpu
def test_on_a_gpu_from_a_state_on_the_cpu() -> None:
    ends = []
    for device, stop in (("cpu", 6), ("cuda", 6), ("cuda", 4)):
        model = build().to(device)
        local, optimizer = LocalSteps(3, outer=diloco, method=BlockInt8()), sgd(model.parameters())
        local.start(model)
        for step in range(6):
            if step == stop:
                file = io.BytesIO()
                torch.save(local.state_dict(), file)
                file.seek(0)
                local = LocalSteps(3, outer=diloco, method=BlockInt8())
                local.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
            x, y = (part.to(device) for part in batch(step, 0))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step(model)
        ends.append(model.cpu())
    close(ends[0], ends[1])
    close(ends[1], ends[2])


def test_schedules_of_the_outer_optimizer_stay() -> None:
    model = build()
    local, optimizer = LocalSteps(1, outer=diloco), sgd(model.parameters())
    local.start(model)
    assert local.outer is not None
    schedule = optim.lr_scheduler.StepLR(local.outer, 1, gamma=0.5)
    train(local, model, optimizer, range(1), 0)
    schedule.step()
    pf.factorize_(model, pf.plan(model, rank=pf.Fixed(4)), optimizer)
    local.start(model)
    assert [group["lr"] for group in local.outer.param_groups] == [0.35]
    again = LocalSteps(1, outer=diloco)
    again.load_state_dict(local.state_dict())
    again.start(model)
    assert again.outer is not None
    assert [group["lr"] for group in again.outer.param_groups] == [0.35]


def test_replaced_parameters_raise_at_once() -> None:
    model = build()
    local, optimizer = LocalSteps(9), sgd(model.parameters())
    with pytest.raises(ValueError, match=r"call local.start\(model\)"):
        local.step(model)
    local.start(model)
    train(local, model, optimizer, range(2), 0)
    pf.factorize_(model, pf.plan(model, rank=pf.Fixed(4), keep=["0"]), optimizer)
    with pytest.raises(
        ValueError, match=r"3.down.weight is 4×40, but was missing.*local.sync\(model\) before"
    ):
        local.step(model)
    with pytest.raises(ValueError, match=r"2 updates since the last average.* would be lost"):
        local.start(model)


def test_state_of_another_run_is_refused() -> None:
    model = build()
    local = LocalSteps(2, outer=diloco)
    local.start(model)
    state = local.state_dict()
    with pytest.raises(ValueError, match="missing anchor"):
        LocalSteps(2).load_state_dict({"updates": 1})
    for other, net, message in (
        (LocalSteps(2, outer=adamw), build(), "saved optimizer is SGD, this one is AdamW"),
        (
            LocalSteps(2, outer=diloco),
            nn.Linear(2, 2),
            "weight is 2×2, but was missing when the model was saved",
        ),
    ):
        other.load_state_dict(state)
        before = copy.deepcopy(net.state_dict())
        with pytest.raises(ValueError, match=message):
            other.start(net)
        equal(dict(net.state_dict()), dict(before))
    fresh = LocalSteps(2)
    fresh.load_state_dict(LocalSteps(2).state_dict())  # saved before the start
    fresh.start(model)


def refused() -> Iterator[tuple[Callable[[], object], type[Exception], str]]:
    model = build()
    frozen = build().requires_grad_(False)
    yield lambda: LocalSteps(0), ValueError, "h=0 is not a number of updates"
    yield lambda: LocalSteps(2, method=SignSGD()), ValueError, "SignSGD sends signs without magnitudes"
    yield lambda: LocalSteps(2, method={"nowhere": TopK()}).start(model), ValueError, "'nowhere' matches no"
    yield (
        lambda: LocalSteps(2, outer=diloco, method=DGC()).start(model),
        ValueError,
        "DGC and the outer SGD both",
    )
    yield (
        lambda: LocalSteps(2, outer=lambda _: sgd(model.parameters())).start(model),
        ValueError,
        "not in the model",
    )
    yield lambda: LocalSteps(2, outer=lambda p: sgd(p[1:])).start(model), ValueError, "does not have 0.weight"
    yield lambda: LocalSteps(2).start(frozen), ValueError, "no parameter"


@pytest.mark.parametrize(("act", "kind", "message"), list(refused()))
def test_invalid_arguments_are_refused(
    act: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        act()


def test_the_first_averages_of_power_sgd_are_uncompressed() -> None:
    """`start` counts averages, not updates."""
    model = nn.Linear(40, 40)
    local = LocalSteps(2, method=PowerSGD(1, start=2))
    local.start(model)
    exact = []
    for step in range(6):
        with torch.no_grad():
            model.weight += torch.randn(40, 40, generator=torch.Generator().manual_seed(step))
        own = model.weight.detach().clone()
        if local.step(model):
            exact.append(torch.allclose(model.weight, own, atol=1e-5))
    assert exact == [True, True, False]
