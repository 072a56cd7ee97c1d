"""Measured plans: who is measured and when, bytes over a link, what is expected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pufferfish as pf
from pufferfish.planning.timing import Mode, Timing

#: Milliseconds of a layer, dense and low-rank.
Table = Callable[[nn.Module], tuple[float, float]]


class FakeTimes:
    """Replaces the measurement: records what would be measured."""

    def __init__(self) -> None:
        self.table: Table = lambda dense: (2.0, 1.0)
        self.step = 20.0
        self.measured: list[tuple[nn.Module, Any, str]] = []
        self.steps: list[str] = []

    def layer(self, dense: nn.Module, low_rank: nn.Module, call: Any, mode: Mode) -> tuple[float, float]:
        self.measured.append((dense, low_rank, mode))
        return self.table(dense)

    def whole_step(self, model: nn.Module, example: Any, mode: Mode) -> float:
        self.steps.append(mode)
        return self.step


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTimes:
    fake = FakeTimes()
    monkeypatch.setattr("pufferfish.planning.timing.measure_layer", fake.layer)
    monkeypatch.setattr("pufferfish.planning.timing.measure_step", fake.whole_step)
    return fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `plan` take this machine for one with a GPU."""
    monkeypatch.setattr("pufferfish.planning.timing._on_cuda", lambda model: True)


X = torch.randn(8, 64, requires_grad=True)  # as the inputs of all but the first layer


def linears(n: int = 2) -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(n)))


# When.


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_an_example_is_measured_by_default(fake: FakeTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pf.plan(linears()).measured == {}  # no example
    assert pf.plan(linears(), example=X, measure=False).measured == {}
    assert not fake.measured
    fake.table = lambda dense: (1.0, 2.0)
    assert pf.plan(linears(), example=X).ranks == {}
    assert {mode for *_, mode in fake.measured} == {"eager"}
    monkeypatch.setenv("WORLD_SIZE", "2")  # workers that decide alone could decide differently
    assert len(pf.plan(linears(3), example=X).ranks) == 3
    assert pf.plan(linears(3), example=X, measure="eager").ranks == {}


def test_on_a_cpu_only_on_request(fake: FakeTimes) -> None:
    assert pf.plan(linears(), example=X).measured == {}
    assert not fake.measured
    for measure, mode in ((True, "eager"), ("eager", "eager"), ("compile", "compile")):
        assert pf.plan(linears(), example=X, measure=measure).measured["mode"] == mode  # type: ignore[arg-type]
    assert [mode for *_, mode in fake.measured] == fake.steps == ["eager", "eager", "compile"]


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="measure='fast' is not"):
        pf.plan(linears(), example=X, measure="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="move the model to a CUDA device"):
        pf.plan(linears(), example=X, measure="graph")
    with pytest.raises(ValueError, match="measure='compile' needs example="):
        pf.plan(linears(), measure="compile")
    for link in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="link="):
            Timing(link=link)


@pytest.mark.usefixtures("gpu")
def test_a_given_plan_is_not_overridden(fake: FakeTimes) -> None:
    model = linears()
    chosen = pf.plan(model, example=X)
    fake.table = lambda dense: (1.0, 2.0)
    slower = pf.plan(linears(3), example=X)
    edited = slower.replace(e.with_rank(16) for e in slower)
    assert len(pf.factorize_(model, pf.Plan.from_json(chosen.to_json())).ranks) == 2
    assert len(pf.factorize_(linears(3), pf.Plan.from_json(edited.to_json())).ranks) == 3
    switched = linears(3)
    switch = pf.Switch(edited, when=pf.AtStep(0))
    assert switch.step(switched, torch.optim.SGD(switched.parameters(), 0.1), step=0)
    assert switch.report is not None
    assert len(switch.report.plan.ranks) == 3


def test_the_time_of_a_layer_is_that_of_all_its_calls(fake: FakeTimes) -> None:
    layer = nn.Linear(64, 64)
    plan = pf.plan(nn.Sequential(layer), 16, example=lambda m: m(m(m(X))), measure=True)
    assert plan["0"].ms == (6.0, 3.0)


# Bytes over a link.


def test_bytes_are_weighed_against_time(fake: FakeTimes) -> None:
    """64·64 weights become 2·16·64: 8,192 bytes of gradients are saved, 0.8192 ms at 10 MB/s."""
    model = linears(1)
    for low_rank_ms, link, becomes_low_rank in (
        (1.2, None, False), (1.2, 1e7, True), (1.2, 1e9, False), (1.81, 1e7, True), (1.82, 1e7, False),
    ):  # fmt: skip
        fake.table = lambda dense, ms=low_rank_ms: (1.0, ms)  # type: ignore[misc]
        plan = pf.plan(model, 16, example=X, measure=Timing(link=link))
        assert bool(plan.ranks) == becomes_low_rank, (low_rank_ms, link)
    assert plan["0"].reason == "slower when measured: 1 ms dense, 1.82 ms low-rank, 0.819 ms less to send"
    model.requires_grad_(False)  # no gradients to send
    fake.table = lambda dense: (1.0, 1.2)
    assert not pf.plan(model, overrides={"*": 16}, example=X, measure=Timing(link=1e7)).ranks


# What is expected.


def test_the_plan_says_what_it_expects(fake: FakeTimes) -> None:
    plan = pf.plan(linears(4), 16, example=X, measure=Timing(link=1e7))
    # Four layers take 2 ms of 20, then 1 ms; 66,560 bytes of gradients become 33,792.
    assert plan.measured == {
        "device": "cpu", "mode": "eager", "link": 1e7, "step_ms": 20.0,
    }  # fmt: skip
    assert plan.speedup == pytest.approx(20 / 16)
    sent = (20 + 6.656) / (16 + 3.3792)
    text = f"expected on cpu, eager: 1.25× as fast, {sent:.2f}× with gradients sent at 10 MB/s, 1.97× fewer bytes"
    assert text in str(plan).splitlines()
    loaded = pf.Plan.from_json(plan.to_json())
    assert loaded == plan
    assert text in str(loaded)
    dense = plan.replace(e.keep_dense("edited") if e.name != "0" else e for e in plan)
    assert dense.speedup == pytest.approx(20 / 19)


def test_without_times_nothing_is_expected(fake: FakeTimes) -> None:
    plan = pf.plan(linears(), example=X)
    assert plan.speedup is None
    assert "expected" not in str(plan)
    unresolved = pf.plan(linears(), pf.Energy(0.5), example=X, measure=True)
    assert "expected" not in str(unresolved)
    assert "expected" in str(pf.resolve(unresolved, linears()))


def test_layers_that_add_up_to_more_than_the_step(fake: FakeTimes) -> None:
    fake.step = 3.0
    assert pf.plan(linears(4), 16, example=X, measure=True).speedup == pytest.approx(3 / 4)


def test_layers_that_cannot_be_measured(fake: FakeTimes) -> None:
    """In eager mode they stay as planned, since a plan on a GPU measures unasked; other modes were asked for."""

    def fails(dense: nn.Module) -> tuple[float, float]:
        raise RuntimeError("out of memory\nand more")

    fake.table = fails
    with pytest.warns(
        UserWarning, match=r"^0: cannot be measured in mode 'eager' \(RuntimeError: out of memory\)$"
    ) as caught:
        plan = pf.plan(linears(), example=X, measure=True)
    assert len(caught) == 1  # equal layers are tried once
    assert len(plan.ranks) == 2
    assert plan.measured == {}
    with pytest.raises(RuntimeError, match=r"^0: cannot be measured in mode 'compile' .*; give measure="):
        pf.plan(linears(), example=X, measure="compile")


def test_measuring_changes_nothing() -> None:
    torch.manual_seed(0)
    words = nn.Embedding(8, 64, max_norm=0.1)  # changes its weight in forward
    model = nn.Sequential(words, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 64))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = pf.plan(model, 16, example=torch.arange(8), measure=True)
    assert plan.speedup is not None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
