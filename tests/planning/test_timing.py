"""Times of layers and whole steps: plausible in every mode, of copies that compute what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import pufferfish as pf
from pufferfish.layers import LowRankConv, LowRankLinear
from pufferfish.planning.profile import profile
from pufferfish.planning.timing import Mode, measure_layer, measure_step

X = torch.randn(8, 64)


def test_a_step_is_measured_for_every_kind_of_example() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    examples: list[Any] = [X, (X,), {"input": X}, lambda m: m(X).sum(), X.to("meta")]
    for example in examples:
        assert 0 < measure_step(model, example) < 1000


def test_the_step_runs_the_whole_example_and_its_backward_pass() -> None:
    ran = []

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ran.append("forward")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            ran.append("backward")
            return grad

    measure_step(nn.Linear(64, 64), lambda m: Recorded.apply(m(X)))
    assert ran[:4] == ["forward", "backward"] * 2
    assert ran.count("forward") == ran.count("backward")


def test_channels_last_layers_are_measured_in_that_format(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    conv = nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)
    low_rank = LowRankConv(conv, {"": 4})
    forward = LowRankConv.forward

    def spied(self: LowRankConv, input: torch.Tensor) -> torch.Tensor:
        seen.append((input, self.down.get_parameter("weight")))
        return forward(self, input)

    monkeypatch.setattr(LowRankConv, "forward", spied)
    call = profile(nn.Sequential(conv), torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)).calls[
        "0"
    ]
    measure_layer(conv, low_rank, call)
    assert seen
    assert all(x.is_contiguous(memory_format=torch.channels_last) for pair in seen for x in pair)


@pytest.mark.slow  # starts the compiler
def test_more_layers_are_compiled_than_torch_compiles_of_one_function() -> None:
    limit = torch._dynamo.config.recompile_limit
    counters.clear()
    for n in range(limit // 2 + 1):
        dense = nn.Linear(64, 16 + n)
        call = profile(nn.Sequential(dense), X).calls["0"]
        times = measure_layer(dense, LowRankLinear(dense, {"": 8}), call, "compile")
        assert all(0 < ms < 1000 for ms in times)
    assert counters["frames"]["ok"] == counters["frames"]["total"] == 2 * (limit // 2 + 1)


@pytest.mark.slow  # starts the compiler
def test_a_compiled_plan() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plan = pf.plan(model, 16, example=X, measure="compile")
    assert plan.measured["mode"] == "compile"
    assert all(e.ms and e.ms[0] > 0 and e.ms[1] > 0 for e in plan)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_modes_on_a_gpu(mode: Mode) -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096)).cuda()
    x = torch.randn(8192, 64, device="cuda")
    plan = pf.plan(model, 0.125, example=x, measure=mode)
    assert plan["2"].rank == 512  # an eighth of the arithmetic of a large product pays on any GPU
    assert plan["2"].ms is not None
    assert plan.measured["mode"] == mode
    assert plan.measured["step_ms"] > plan["2"].ms[1]
    assert plan.speedup is not None
    assert plan.speedup > 1
