"""`Breakdown` and `GradientTimeline` in one process: the parts add up for every kind of loop."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from pufferfish.measure import Breakdown, breakdown
from pufferfish.measure.breakdown import PARTS, GradientTimeline


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, accumulate: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            model(torch.ones(16, 64)).square().mean().backward()
        optimizer.step()


def sum_of_parts(times: Breakdown) -> float:
    return sum(times.parts[name] for name in PARTS)


def test_parts_add_up_to_the_wall_clock() -> None:
    model, optimizer = model_and_optimizer()
    start = time.perf_counter()
    with Breakdown(model, optimizer) as times:
        train(model, optimizer, 20)
    wall = time.perf_counter() - start
    assert times.steps == 20
    assert sum_of_parts(times) == pytest.approx(times.parts["step"])
    assert 0 < 20 * times.parts["step"] <= wall
    assert all(times.parts[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
    assert times.parts["encode"] == times.parts["decode"] == times.parts["hidden"] == 0
    assert "backward" in str(times)


def test_time_lands_where_it_was_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock that only work in one place advances."""
    clock = [0.0]
    monkeypatch.setattr(breakdown, "timestamp", lambda device: clock[0])

    def work(x: Tensor, at: bool) -> Tensor:
        clock[0] += at
        return x.clone()

    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            return work(g, where == "backward")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return SlowBackward.apply(work(self.inner(x), where == "forward"))

    for where in ("data", "forward", "loss", "backward", "clipping"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Breakdown(model) as times:
            for _ in range(3):
                x = work(torch.ones(2, 8), where == "data")
                loss = work(model(x), where == "loss").sum()
                loss.backward()
                work(x, where == "clipping")
                optimizer.step()
        part = {"loss": "forward", "clipping": "optimizer"}.get(where, where)
        assert {name: x for name, x in times.parts.items() if x} == {part: 1.0, "step": 1.0}


def test_accumulation_and_validation_inside_a_loop() -> None:
    model, optimizer = model_and_optimizer()
    with Breakdown(model) as times:
        train(model, optimizer, 4, accumulate=3)
        with torch.no_grad():
            model(torch.ones(2, 64))
        train(model, optimizer, 1)
    assert times.steps == 5


def test_read_starts_a_new_measurement() -> None:
    model, optimizer = model_and_optimizer()
    with Breakdown(model) as times:
        train(model, optimizer, 3)
        first = times.read()
        assert times.steps == 3
        assert times.read()["step"] == 0
        train(model, optimizer, 2)
    assert times.steps == 2
    assert times.parts["step"] != first["step"]


def test_only_the_models_optimizers_count() -> None:
    model, optimizer = model_and_optimizer()
    other, others = model_and_optimizer()
    second = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with Breakdown(model) as own, Breakdown(model, second) as given:
        train(model, optimizer, 2)
        train(other, others, 3)
        train(model, second, 1)
    assert own.steps == 3
    assert given.steps == 1


def test_hooks_are_removed_after_an_error() -> None:
    from torch.optim import optimizer as module

    model, _ = model_and_optimizer()
    outs = []

    def broken() -> None:
        with Breakdown(model):
            outs.append(model(torch.ones(2, 64)))
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    outs[0].sum().backward()  # the tensor hook is still registered and must do nothing
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not module._global_optimizer_pre_hooks
    assert not module._global_optimizer_post_hooks


def test_backward_that_raises() -> None:
    model, optimizer = model_and_optimizer()

    def fail(g: Tensor) -> None:
        raise KeyError("mine")

    with Breakdown(model) as times:
        x = torch.ones(2, 64, requires_grad=True)
        x.register_hook(fail)
        with pytest.raises(KeyError):
            model(x).sum().backward()
        optimizer.zero_grad()
        train(model, optimizer, 2)
    assert times.steps == 2
    assert times.parts["backward"] > 0


def test_outputs_of_any_form() -> None:
    @dataclass
    class Out:
        logits: Tensor
        extra: dict[str, Tensor]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Out:
            y = self.inner(x)
            return Out(y, {"more": y * 2})

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Breakdown(model) as times:
        out = model(torch.ones(2, 4))
        (out.logits.sum() + out.extra["more"].sum()).backward()
        optimizer.step()
    assert times.steps == 1
    assert times.parts["backward"] > 0


def test_timeline_follows_the_order_of_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False))
    with GradientTimeline(model) as timeline:
        for _ in range(4):
            model(torch.ones(1, 8)).sum().backward()
    curve = timeline.curve()
    assert [share for share, _ in curve] == [0, 0.75, 1]  # the last layer's gradient is ready first
    assert [when for _, when in curve] == sorted(when for _, when in curve)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not model._forward_hooks
    assert GradientTimeline(model).curve() == ((0, 0), (1, 1))


def test_timeline_starts_with_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the head comes first, but most of the backward pass has gone by then."""
    clock = itertools.count()
    monkeypatch.setattr(breakdown, "timestamp", lambda device: float(next(clock)))

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            for _ in range(50):
                next(clock)
            return gradient

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": Slow.apply(super().forward(x))}  # type: ignore[no-untyped-call]

    model = Net(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False))
    with GradientTimeline(model) as timeline:
        for _ in range(4):
            model(torch.ones(1, 8))["logits"].sum().backward()
            next(clock)  # between passes, which does not count
    share, when = timeline.curve()[1]
    assert share == 0.75
    assert when == 51 / 52


@pytest.mark.gpu
def test_no_gpu_synchronization_before_read() -> None:
    model, _ = model_and_optimizer()
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(16, 64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Breakdown(model) as times:
            for _ in range(5):
                model(x).square().mean().backward()
                optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert times.steps == 5
    assert sum_of_parts(times) == pytest.approx(times.parts["step"])
    assert all(times.parts[name] >= 0 for name in PARTS)
