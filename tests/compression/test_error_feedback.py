"""Error feedback: where it is kept, in which units, and when it is sent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from driver import mean
from pufferfish.compression import (
    DGC,
    AlternatingPowerSGD,
    BFloat16,
    BlockInt8,
    EFSignSGD,
    Engine,
    Int2,
    Int4,
    Method,
    NoCompression,
    PowerSGD,
    RandomK,
    Settings,
    Signum,
    Simulated,
    SparseLoCo,
    TopK,
)
from pufferfish.compression.check_compressor import gradients


def error(engine: Engine, name: str) -> Tensor:
    """A parameter's error feedback, copied."""
    saved: Tensor = engine.state_dict()["own"][name]["error"]
    return saved


def use(engine: Engine | Simulated, method: Method) -> None:
    settings = (engine.engines[0] if isinstance(engine, Simulated) else engine).settings
    engine.use(replace(settings, method=method))


def test_global_scope_chooses_among_all_elements() -> None:
    engine = Engine(Settings(TopK(50), smallest=0, scope="global"))
    g = gradients(1)[0]
    g["c.weight"] *= 100
    done = engine.average(g)
    assert (done["c.weight"] != 0).sum() == 50
    assert not any(done[name].any() for name in g if name != "c.weight")
    for name in g:
        assert torch.equal(error(engine, name) + done[name], g[name])
    later = engine.average({name: 1e-3 * torch.ones_like(x) for name, x in g.items()})
    assert (later["c.weight"] != 0).sum() == 50  # error feedback there is still the largest


@pytest.mark.parametrize(
    ("method", "workers", "close"),
    [
        (TopK(0.1), 2, 1e-6),
        (BlockInt8(8), 2, 1e-6),
        (PowerSGD(2), 1, 1e-6),
        (PowerSGD(2), 2, 2e-3),  # rounding inside the sum, where no worker sees it
        (AlternatingPowerSGD(2), 1, 1e-6),
        (SparseLoCo(decay=1.0), 2, 1e-6),
    ],
    ids=repr,
)
def test_rounded_results_are_made_up_for(method: Method, workers: int, close: float) -> None:
    """All bf16 gradients are what was applied, in bf16, and what error feedback holds."""
    simulated = Simulated(Settings(method, smallest=0), workers)
    shapes = {name: g.shape for name, g in gradients(1)[0].items() if g.dim() > 1}
    given_in_all = {name: torch.zeros(shape) for name, shape in shapes.items()}
    left = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for step in range(6):
        given = [{name: g[name].bfloat16() for name in shapes} for g in gradients(workers, step)]
        done = simulated.average(given)[0]
        for name in shapes:
            assert done[name].dtype == torch.bfloat16
            exact = mean([{name: g[name].float()} for g in given], name)
            given_in_all[name] += exact
            left[name] += exact - done[name].float()
    for name, x in left.items():
        held = sum(error(engine, name) for engine in simulated.engines) / workers
        if method == BlockInt8(8):
            states = [engine.state_dict()["own"][name]["owner"] for engine in simulated.engines]
            held = held + torch.cat([s.flatten() for s in states])[: x.numel()].view(x.shape)
        assert (x - held).norm() <= close * given_in_all[name].norm(), name


def test_unused_parameters_keep_their_error_feedback() -> None:
    """Zero on all workers: it is not sent. Zero on one: that worker's error feedback is."""
    simulated = Simulated(Settings(TopK(0.1), smallest=0), 2)
    simulated.average(gradients(2))
    before = [error(simulated.engines[w], "b.weight") for w in (0, 1)]
    given = gradients(2, 1)
    for g in given:
        g["b.weight"].zero_()
    done = simulated.average(given)[0]
    assert not done["b.weight"].any()
    assert done["a.weight"].any()
    assert all(torch.equal(error(simulated.engines[w], "b.weight"), before[w]) for w in (0, 1))
    given[0]["b.weight"][0, 0] = 1.0
    assert simulated.average(given)[0]["b.weight"].any()
    assert not torch.equal(error(simulated.engines[1], "b.weight"), before[1])


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_units_scale_the_error_feedback(scope: str) -> None:
    """Error feedback counts at the learning rate of its own step. Where units are zero, the last ones count."""
    engine = Engine(Settings(TopK(0.1), smallest=0, scope=scope))  # type: ignore[arg-type]
    names = list(gradients(1)[0])
    zeros = {name: torch.zeros_like(g) for name, g in gradients(1)[0].items()}
    engine.average(gradients(1)[0], dict.fromkeys(names, 10.0))
    before = {name: error(engine, name) for name in names}
    engine.average(zeros, {name: 100.0 if name == "a.weight" else 10.0 for name in names})
    assert torch.equal(error(engine, "a.weight"), before["a.weight"] * 10)
    assert torch.equal(error(engine, "b.weight"), before["b.weight"])
    engine.average(zeros, dict.fromkeys(names, 0.0))
    assert torch.equal(error(engine, "b.weight"), before["b.weight"])
    engine.average(zeros, dict.fromkeys(names, 20.0))
    assert torch.equal(error(engine, "b.weight"), before["b.weight"] * 2)


@pytest.mark.parametrize(
    "rates",
    # powers of two, whose products are exact
    [[1 / 2, 1 / 4, 0, 1 / 16, 1 / 8, 0], [0, 0, 1 / 4, 0, 0, 1 / 32]],
    ids=["down to 0 and back", "zeros on both sides"],
)
@pytest.mark.parametrize("scales", [[1.0] * 6, [8.0, 8.0, 4.0, 2.0, 8.0, 8.0]], ids=["", "loss scale"])
@pytest.mark.parametrize("method", [TopK(0.1), PowerSGD(2), BlockInt8(8)], ids=repr)
def test_a_learning_rate_of_zero_keeps_the_unit(
    method: Method, rates: list[float], scales: list[float]
) -> None:
    """The reference holds its error feedback as a part of the update: it needs no rescaling.

    It passes rate × gradient, so what is left of that keeps its worth. Instead of 0 it takes the last rate, or the
    first one to come.
    """
    simulated = Simulated(Settings(method, smallest=0), 2)
    reference = Simulated(Settings(method, smallest=0), 2)
    last = next(rate for rate in rates if rate)
    for step, (rate, scale) in enumerate(zip(rates, scales, strict=True)):
        last = rate or last
        given = gradients(2, step)
        scaled = [{name: g * scale for name, g in own.items()} for own in given]
        units = dict.fromkeys(given[0], scale / rate if rate else 0.0)
        applied = simulated.average(scaled, units, scale)[0]
        right = reference.average([{name: g * last for name, g in own.items()} for own in given])[0]
        for name, x in right.items():
            torch.testing.assert_close(applied[name] * (last / scale), x, rtol=1e-4, atol=1e-5)


def test_another_method_continues_with_the_error_feedback_or_sends_it() -> None:
    simulated = Simulated(Settings(PowerSGD(1), smallest=0), 2)
    total = {name: torch.zeros_like(g) for name, g in gradients(1)[0].items()}
    for step, method in enumerate([None, TopK(0.1), NoCompression(), None]):
        if method is not None:
            use(simulated, method)
        given = gradients(2, step)
        done = simulated.average(given)[0]
        for name, left in total.items():
            left += mean(given, name) - done[name]
        held = [engine.state_dict()["own"] for engine in simulated.engines]
        if step < 2:
            for name in ("a.weight", "c.weight"):
                torch.testing.assert_close(
                    total[name], mean([{name: own[name]["error"]} for own in held], name)
                )
        else:
            assert held == [{}, {}]
            assert all(left.abs().max() < 1e-5 for left in total.values())
    assert simulated.engines[0].state_dict()["shared"] == {}  # PowerSGD's Q is gone


def test_a_bad_step_keeps_the_error_feedback_of_the_method_before() -> None:
    engine = Engine(Settings(TopK(0.1), smallest=0))
    engine.average(gradients(1)[0])
    before = error(engine, "a.weight")
    use(engine, BFloat16())
    bad = gradients(1)[0]
    bad["scale"].fill_(math.inf)
    engine.average(bad)
    assert torch.equal(error(engine, "a.weight"), before)


@pytest.mark.parametrize("method", [TopK(0.1), RandomK(0.1), RandomK(0.3, "own"), PowerSGD(1)], ids=repr)
def test_workers_that_disagree_find_their_common_optimum(method: Method) -> None:
    """½‖x − c‖² with another c on each worker: the optimum is their mean. Without error feedback Top-k misses it."""
    torch.manual_seed(1)
    c = [torch.randn(10, 10) * 10 ** torch.linspace(-1, 1, 10) for _ in range(4)]
    best = sum(c) / 4
    missed = {}
    for error_feedback in (None, False) if isinstance(method, TopK) else (None,):
        simulated = Simulated(Settings(method, smallest=0, error_feedback=error_feedback), 4)
        x = torch.zeros(10, 10)
        for step in range(250):
            x -= 0.1 * (1 - step / 250) * simulated.average([{"x": x - c_} for c_ in c])[0]["x"]
        missed[error_feedback] = float((x - best).norm() / best.norm())
    assert missed[None] < 0.03
    assert missed.get(False, 1.0) > 0.1


def test_a_new_parameter_leaves_the_state_of_its_batch_alone() -> None:
    """It joins a batch of its shape, without state of its own."""
    simulated = Simulated(Settings(BlockInt8(8), smallest=0), 2)
    g = [{"b": torch.randn(4, 8)} for _ in range(2)]
    simulated.average(g)
    before = simulated.engines[1].state_dict()["own"]["b"]
    simulated.average([{"a": torch.randn(4, 8), "b": torch.zeros(4, 8)} for _ in range(2)])
    after = simulated.engines[1].state_dict()["own"]
    assert all(torch.equal(after["b"][key], x) for key, x in before.items())
    assert after["a"].keys() == {"error", "owner"}


def lost(first: Method, second: Method, size: int) -> float:
    """All gradients less what was applied and what error feedback holds, relative to the gradients."""
    simulated = Simulated(Settings(first, smallest=0), size)
    total = torch.zeros(24, 36)
    for step in range(6):
        if step == 3:
            use(simulated, second)
        given = gradients(size, step)
        total += mean(given, "a.weight") - simulated.average(given)[0]["a.weight"]
    held = sum(error(engine, "a.weight") for engine in simulated.engines)
    return float((total - held / size).norm() / 6 / 30)


@pytest.mark.parametrize("second", [TopK(0.1), TopK(0.5)], ids=repr)
@pytest.mark.parametrize(
    "first", [DGC(0.9, momentum=0.0), EFSignSGD(), BlockInt8(8), Int2(8), TopK(0.1)], ids=repr
)
def test_nothing_is_lost_between_methods(first: Method, second: Method) -> None:
    assert lost(first, second, 3) < 1e-6


def test_error_feedback_can_be_switched_off() -> None:
    for method in (EFSignSGD(), BlockInt8(8), Int4(8), SparseLoCo(), TopK(0.1)):
        simulated = Simulated(Settings(method, smallest=0, error_feedback=False), 2)
        simulated.average(gradients(2))
        assert not any(engine.state_dict()["own"] for engine in simulated.engines), method


def test_an_owner_keeps_nothing_of_unused_parameters() -> None:
    engine = Engine(Settings(TopK(0.1), smallest=0))
    engine.average(gradients(1)[0])
    use(engine, EFSignSGD())
    given = gradients(1, 1)[0]
    engine.average(given | {"b.weight": torch.zeros(24, 36)})
    own = engine.state_dict()["own"]
    assert own["a.weight"]["owner"].any()
    assert not own["b.weight"]["owner"].any()


def test_a_momentum_follows_the_loss_scale_and_not_the_learning_rate() -> None:
    engine = Engine(Settings(Signum(), smallest=0))
    g = {"w": torch.ones(3, 3)}
    engine.average(g, {"w": 8.0}, scale=4.0)
    before = engine.state_dict()["own"]["w"]["m"]
    engine.average({"w": torch.zeros(3, 3)}, {"w": 1.0}, scale=2.0)
    assert torch.equal(engine.state_dict()["own"]["w"]["m"], before / 2)
