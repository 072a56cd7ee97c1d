"""factorize_, reshape_ and merge_: a failure in any layer changes nothing."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import pufferfish as pf
from mixed import Mixed, images, snapshot


def poison(value: float) -> Callable[[Mixed], None]:
    def break_it(model: Mixed) -> None:
        with torch.no_grad():
            model.fc.weight[3, 4] = value

    return break_it


def tie(model: Mixed) -> None:
    model.also = nn.Linear(64, 48)
    model.also.weight = model.fc.weight


def inner_hook(model: Mixed) -> None:
    model.attention.out_proj.register_forward_hook(lambda *args: None)


FAILURES: dict[str, tuple[Callable[[Mixed], Any], str]] = {
    "nan": (poison(float("nan")), "fc: the weight contains inf or NaN; nothing was changed"),
    "inf": (poison(float("inf")), "fc: the weight contains inf or NaN"),
    "tied": (tie, "fc: its weight is shared with another layer"),
    "state dict hook": (
        lambda m: m.fc.register_state_dict_post_hook(lambda *args: None),
        r"fc: its hooks \(state_dict_hooks\) cannot be moved to the new layer; remove them",
    ),
    "state dict pre-hook": (lambda m: m.fc.register_state_dict_pre_hook(lambda *args: None), "state_dict_pre_hooks"),
    "load pre-hook": (lambda m: m.fc.register_load_state_dict_pre_hook(lambda *args: None), "load_state_dict_pre_hooks"),
    "load post-hook": (lambda m: m.fc.register_load_state_dict_post_hook(lambda *args: None), "load_state_dict_post_hooks"),
    "tensor hook": (lambda m: m.fc.weight.register_hook(lambda grad: grad), r"fc\.weight: its gradient hooks"),
    "accumulation hook": (
        lambda m: m.fc.weight.register_post_accumulate_grad_hook(lambda p: None),
        r"fc\.weight: its gradient hooks cannot be moved to the new parameter; remove them",
    ),
    "sliced bias hook": (
        lambda m: m.attention.in_proj_bias.register_hook(lambda grad: grad),
        r"attention\.in_proj_bias: its gradient hooks",
    ),
    "inner hook": (inner_hook, "attention: hooks of its children"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_changes_nothing(name: str) -> None:
    model = Mixed()
    break_it, message = FAILURES[name]
    plan = pf.plan(model, 4)
    optimizer = optim.Adam(model.parameters())
    model(images()).sum().backward()
    optimizer.step()
    break_it(model)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=message):
        pf.factorize_(model, plan, optimizer)
    assert str(snapshot(model, optimizer)) == str(before)  # as text, where NaN is equal to NaN


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: optim.LBFGS(p), "LBFGS does not support a change of parameters"),
        (lambda p: optim.SparseAdam(p), "SparseAdam does not support"),
        (lambda p: [optim.SGD(p, 0.1), optim.LBFGS(p)], "LBFGS does not support"),
        (
            lambda p: [optim.lr_scheduler.StepLR(optim.SGD(p, 0.1), 1)],
            "StepLR is not a torch.optim.Optimizer",
        ),
        (
            lambda p: optim.lr_scheduler.StepLR(optim.SGD(p, 0.1), 1),
            "StepLR is not a torch.optim.Optimizer; pass",
        ),
        (lambda p: nn.Sequential(nn.Linear(2, 2)), "Sequential is not a torch.optim.Optimizer; pass"),
    ],
)
def test_optimizers_that_cannot_follow(optimizer: Callable[[Any], Any], message: str) -> None:
    model = Mixed()
    given = optimizer(list(model.parameters()))
    before = snapshot(model, None)
    with pytest.raises(TypeError, match=message):
        pf.factorize_(model, pf.plan(model, 4), given)
    with pytest.raises(TypeError, match=message):
        pf.reshape_(model, pf.plan(model, 4), given)
    assert snapshot(model, None) == before
    pf.factorize_(model, pf.plan(model, 4))
    before = snapshot(model, None)
    with pytest.raises(TypeError, match=message):
        pf.merge_(model, given)
    assert snapshot(model, None) == before


@pytest.mark.parametrize("hook", ["state", "inside", "gradient"])
def test_merge_refuses_before_it_changes_anything(hook: str) -> None:
    model = Mixed()
    pf.factorize_(model, pf.plan(model, 4))
    if hook == "state":
        model.fc.register_state_dict_post_hook(lambda *args: None)
    elif hook == "inside":
        model.fc.down.register_forward_hook(lambda *args: None)
    else:
        model.fc.up.weight.register_hook(lambda grad: grad)
    before = snapshot(model, None)
    with pytest.raises(ValueError, match=r"fc.*cannot be moved to the new .*; remove them"):
        pf.merge_(model)
    assert snapshot(model, None) == before


@pytest.mark.parametrize("verb", [pf.factorize_, pf.reshape_])
def test_the_model_itself_is_the_layer(verb: Callable[..., Any]) -> None:
    layer = nn.Linear(64, 64)
    with pytest.raises(
        ValueError, match=r"the model itself is the layer to replace; wrap it in an nn\.Sequential"
    ):
        verb(layer, pf.plan(layer))
    model = nn.Sequential(layer)
    pf.factorize_(model, pf.plan(model))
    with pytest.raises(
        ValueError, match=r"the model itself is the low-rank layer; wrap it in an nn\.Sequential"
    ):
        pf.merge_(model[0])


def test_rules_need_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64))
    plan = pf.plan(model, pf.Energy(0.5))
    with pytest.raises(ValueError, match="0: the weight is on the meta device and has no values"):
        pf.factorize_(model, plan)
    with pytest.raises(ValueError, match="on the meta device"):
        pf.planning.spectra(model)


@pytest.mark.parametrize("way", ["factorize_", "reshape_", "load"])
def test_an_optimizer_that_is_left_behind(way: str, tmp_path: Path) -> None:
    """It would silently train none of the replaced weights."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    done = pf.factorize_(trained := build(), pf.plan(trained, rank=0.25))
    pf.save(trained, tmp_path / "small")

    def change(model: nn.Module, *optimizer: optim.Optimizer) -> None:
        if way == "load":
            pf.load(model, tmp_path / "small")
        else:
            getattr(pf, way)(model, done if way == "reshape_" else pf.plan(model, rank=0.25), *optimizer)

    model = build()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    remedy = "create it after load" if way == "load" else "pass it as optimizer=, or create it afterwards"
    with pytest.warns(UserWarning, match=rf"0\.weight is replaced .* \(SGD\) holds it .*; {remedy}"):
        change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        change(build())
        model = build()
        if way != "load":
            change(model, optimizer := optim.SGD(model.parameters(), lr=0.1))
            assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
