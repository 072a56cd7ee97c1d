"""The switch in one process: the moment, the model, the optimizer, and going on from a checkpoint."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.planning.rules import stable_rank


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 32, generator=generator), torch.randint(4, (16,), generator=generator)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_reset_drops_the_state_of_replaced_parameters_and_only_theirs() -> None:
    model = build()
    optimizer = adamw(model)
    update(model, optimizer, 0)
    pf.Switch(rank=0.25, keep=["4"], when=pf.AtEpoch(0), state="reset").step(model, optimizer, epoch=0)
    without = {name for name, p in model.named_parameters() if not optimizer.state.get(p)}
    assert without == {f"{layer}.{part}.weight" for layer in ("0", "2") for part in ("down", "up")}
    update(model, optimizer, 1)


@pytest.mark.parametrize(
    "settings", [{"plan": "made", "rank": 8}, {"plan": "made", "keep": ["0"]}, {"state": "half"}]
)
def test_contradicting_settings(settings: dict[str, Any]) -> None:
    if settings.get("plan"):
        settings = settings | {"plan": pf.plan(build())}
    with pytest.raises(ValueError, match="Switch"):
        pf.Switch(**settings)


def other_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": ["fc"]}, "keep: the pattern 'fc' matches no layer; the layers are 0, 2, 4"),
        ({"keep": ["fc"], "rank": 0.25}, "the pattern 'fc' matches no layer"),
        ({"rank": pf.Budget(macs=100)}, "needs example="),
        ({"rank": pf.StableRank({"0": 3.0})}, "has no spectrum of '2'"),
        ({"plan": pf.plan(other_net())}, "0: the plan is for a weight of 64×64.*has a weight of 64×32"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_could_never_work_is_refused_at_the_first_call(
    settings: dict[str, Any], message: str, compiled: bool
) -> None:
    model = build()
    runs = torch.compile(model, backend="eager") if compiled else model
    switch = pf.Switch(when=pf.AtEpoch(3), **settings)
    with pytest.raises(ValueError, match=message):
        switch.due(runs, epoch=0)
    for _ in range(2):  # as long as nothing is mended
        with pytest.raises(ValueError, match=message):
            switch.step(runs, momentum(model), epoch=0)


def test_the_automatic_recipe() -> None:
    """Stable ranks from the first call on; the switch when they are flat, aligned ranks, scaled by the start."""
    model = build()
    optimizer = momentum(model)
    switch = pf.Switch()
    start = {name: stable_rank(s) for name, s in pf.planning.spectra(model).items()}
    moments = []
    for epoch in range(30):
        if switch.step(model, optimizer, epoch=epoch, total=60):
            moments.append(epoch)
        if epoch < 2:  # then the weights stand still
            update(model, optimizer, epoch)
    assert switch.initial is not None
    assert {n: stable_rank(torch.tensor(s)) for n, s in switch.initial.items()} == pytest.approx(start)
    assert len(moments) == 1
    assert 11 <= moments[0] <= 20
    assert switch.report is not None
    assert str(switch.report).startswith(
        f"Switched to low rank at epoch {moments[0]}, as the ranks had settled: "
    )
    for e in switch.report.plan:
        assert e.rank is None or e.rank % 16 == 0


@pytest.mark.filterwarnings("error")
def test_the_automatic_recipe_without_a_total() -> None:
    model = build()
    optimizer = momentum(model)
    switch = pf.Switch()
    with pytest.warns(UserWarning, match=r"no total=.* after more than 11 observations, or never") as seen:
        changed = [switch.step(model, optimizer, epoch=0)]
    changed += [switch.step(model, optimizer, epoch=epoch) for epoch in range(1, 14)]  # constant weights
    assert changed.index(True) == 11
    assert len(seen) == 1
    assert seen[0].filename == __file__
    with pytest.raises(ValueError, match="total="):
        pf.Switch(when=pf.RanksSettle(latest=pf.AtFraction(0.5))).step(build(), None, epoch=0)


def test_a_call_that_failed_is_not_an_observation() -> None:
    model = build()
    switch = pf.Switch(when=pf.RanksSettle(latest=pf.AtEpoch(0)), evaluate=lambda model: None)  # type: ignore
    for _ in range(3):
        with pytest.raises(TypeError, match="NoneType"):
            switch.step(model, momentum(model), epoch=0)
    assert len(switch.history) == 1


def test_the_latest_moment() -> None:
    model = build()
    switch = pf.Switch(rank=0.25, when=pf.RanksSettle(latest=pf.AtFraction(0.5)))
    assert [switch.step(model, momentum(model), epoch=e, total=10) for e in range(7)].index(True) == 5
    said = str(switch.report)
    assert said.startswith("Switched to low rank at epoch 5, the latest moment; ranks had not settled: ")
    again = pf.Switch()
    again.load_state_dict(switch.state_dict())
    assert str(again.report) == said


@pytest.mark.parametrize("compiled", ["torch.compile(model)", "model.compile()"])
def test_compiled_models(compiled: str) -> None:
    model = build()
    optimizer = momentum(model)
    runs: nn.Module = model
    if compiled == "model.compile()":
        model.compile(backend="aot_eager")
    else:
        runs = torch.compile(model, backend="aot_eager")
    reference, other = build(), None
    other = momentum(reference)
    graphs: list[Any] = []  # of a function that has nothing to do with the model
    elsewhere = torch.compile(lambda x: x + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    switch = pf.Switch(rank=0.25, when=pf.AtStep(2))
    for step in range(4):
        if switch.step(runs, optimizer, step=step):
            pf.factorize_(reference, pf.plan(reference, 0.25), other)
        update(runs, optimizer, step)
        update(reference, other, step)
        elsewhere(torch.ones(2))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert len(graphs) == 1


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_users_own_checkpoint_before_at_and_after_the_switch(stop: int) -> None:
    def run(steps: range, saved: dict[str, Any] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = build()
        switch = pf.Switch(when=pf.RanksSettle(span=2, tolerance=100.0))
        if saved:
            switch.load_state_dict(saved["switch"])
            if switch.report is not None:
                pf.reshape_(model, switch.report.plan)
        optimizer = adamw(model)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in steps:
            switch.step(model, optimizer, step=step, total=100)
            update(model, optimizer, step)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        json.dumps(switch.state_dict())
        return model.state_dict(), copy.deepcopy(state | {"switch": switch.state_dict()})

    whole, _ = run(range(8), None)
    assert any(name.endswith("down.weight") for name in whole)
    _, saved = run(range(stop), None)
    resumed, _ = run(range(stop, 8), saved)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("make", [momentum, adamw])
def test_there_and_back_again(make: Any) -> None:
    """A full-rank finish is `merge_` at its moment, the optimizer's state lifted."""
    model, reference = build(), build()
    optimizer, other = make(model), make(reference)
    switch = pf.Switch(rank=0.25, when=pf.AtFraction(0.25), back=pf.AtFraction(0.75))
    for step in range(8):
        assert switch.step(model, optimizer, step=step, total=8) == (step in (2, 6))
        assert not switch.step(model, optimizer, step=step, total=8)
        now = "not yet switched" if step < 2 else "low rank since step 2"
        now = now if step < 6 else "full rank again since step 6"
        assert repr(switch) == f"<Switch: ratio 0.25, when=AtFraction(share=0.25); {now}>"
        told = str(switch.report)
        assert ("merged back to full rank at step 6" in told) == (step >= 6), told
        again = pf.Switch()
        again.load_state_dict(switch.state_dict())
        assert (str(again.report), again.merged) == (told, switch.merged)
        if step == 2:
            pf.factorize_(reference, pf.plan(reference, 0.25), other)
        if step == 6:
            pf.merge_(reference, other)
        update(model, optimizer, step)
        update(reference, other, step)
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == q[0]
        assert torch.equal(p, q[1])
    assert not switch.low_rank


def test_pickling_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled; save switch\.state_dict\(\) instead"):
        pickle.dumps(pf.Switch())


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_restored_in_place_before_between_and_after(stop: int) -> None:
    """`restore_` gives whatever structure the saved run had, also to a model that has it already."""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, pf.Switch]:
        model = build()
        return model, adamw(model), pf.Switch(rank=0.25, when=pf.AtStep(2), back=pf.AtStep(3))

    model, optimizer, switch = fresh()
    for step in range(stop):
        switch.step(model, optimizer, step=step)
        update(model, optimizer, step)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), switch.state_dict()))
    other, again, resumed = fresh()
    for _ in range(2):
        resumed.restore_(other, again, saved[2])
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for step in range(stop, 7):
        for net, opt, s in ((model, optimizer, switch), (other, again, resumed)):
            s.step(net, opt, step=step)
            update(net, opt, step)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_model_of_another_structure_cannot_be_restored() -> None:
    model = build()
    optimizer = momentum(model)
    switch = pf.Switch(rank=0.25, when=pf.AtStep(1))
    switch.step(model, optimizer, step=0)
    dense = switch.state_dict()
    switch.step(model, optimizer, step=1)
    with pytest.raises(ValueError, match="pass the dense model"):
        pf.Switch(rank=0.25, when=pf.AtStep(1)).restore_(model, optimizer, dense)


def test_asking_whether_it_is_due_changes_nothing() -> None:
    model = build()
    optimizer = momentum(model)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(1))
    assert [switch.due(model, epoch=epoch) for epoch in (0, 1)] == [False, True]
    assert not any(isinstance(m, pf.layers.LowRank) for m in model.modules())
    assert switch.step(model, optimizer, epoch=1)
    assert not switch.due(model, epoch=2)


def test_moments_are_checked_at_once() -> None:
    with pytest.raises(TypeError, match="when=3 is not a moment"):
        pf.Switch(rank=16, when=3)
    with pytest.raises(TypeError, match=r"back=RanksSettle.* is not a moment"):
        pf.Switch(rank=16, back=pf.RanksSettle())
    model = build()
    switch = pf.Switch(rank=16, keep=["4"], when=pf.AtStep(2), back=pf.AtEpoch(3))
    with pytest.raises(ValueError, match=r"AtEpoch.* needs epoch="):
        switch.step(model, momentum(model), step=0)
