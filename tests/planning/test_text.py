"""Remarks under a printed plan, and the warning about a plan that changes little."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pufferfish as pf
from pufferfish.planning import Plan


class Own(nn.Linear):
    """A type that nobody has registered."""


def warned(plan: Plan, model: nn.Module) -> list[str]:
    """Texts of the warnings of `factorize_`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pf.factorize_(model, plan)
    assert all(w.category is UserWarning and w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def test_nothing_changes() -> None:
    model = nn.Sequential(*(Own(64, 64) for _ in range(12)), nn.Embedding(48, 64), nn.Linear(64, 9))
    plan = pf.plan(model)
    before = list(model.modules())
    (text,) = warned(plan, model)
    assert list(model.modules()) == before
    first, line = text.splitlines()
    assert first == (
        "The plan changes nothing. What stays dense: 92% in Own: no low-rank form is registered; "
        "6% in Embedding: a lookup, not a product; embed= (--embed) factorizes it; "
        "1% in Linear: not smaller at rank 16: the largest that saves is 7."
    )
    assert line.endswith(f'pf.register("{__name__}.Own", pf.layers.LowRankLinear)')
    assert text in str(plan)


def test_reasons_that_differ_are_those_of_the_largest_layer() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(64, 64), nn.Conv2d(8, 8, 3, groups=8))
    (text,) = warned(pf.plan(model, 60), model)
    assert text.endswith(
        "96% in Linear: not smaller at rank 60: the largest that saves is 31 (1); 2% in Conv2d: depthwise."
    )


def test_shapes_of_blocks() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, groups=2), nn.Conv2d(64, 64, 3, groups=64))
    lines = str(pf.plan(model)).splitlines()
    assert "64×32×3×3 in 2 " in lines[1]
    assert "64×1×3×3 " in lines[2]  # "in 64" would say nothing new
    assert " in " not in lines[2]


def test_the_warning_of_a_switch_names_the_line_of_the_caller() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.warns(UserWarning, match="changes nothing") as seen:
        pf.Switch(rank=63, when=pf.AtEpoch(1)).step(model, None, epoch=0)
    assert seen[0].filename == __file__


def test_less_than_a_tenth_changes() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(11)))
    plan = pf.plan(model, only=["0"])
    (text,) = warned(plan, model)
    assert (
        text
        == "The plan changes 9.1% of the parameters. What stays dense: 91% in Linear: not matched by `only`."
    )
    assert text in str(plan)


@pytest.mark.parametrize("rank", [0.25, pf.Energy(0.5)])
def test_a_tenth_is_enough(rank: Any) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(10)))
    plan = pf.plan(model, rank, only=["0"])
    assert "What stays dense" not in str(plan)
    assert warned(plan, model) == []


def test_a_model_without_matrices() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    (text,) = warned(pf.plan(model), model)
    assert text == "The plan changes nothing. What stays dense: the model has no matrices."
    assert str(pf.plan(model)).endswith(text)


def test_loading_a_dense_model_does_not_warn() -> None:
    model = nn.Sequential(Own(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.reshape_(model, pf.lowrank.plan_of(model))


def test_the_time_of_a_layer_with_several_matrices_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pufferfish.planning.timing.measure_layer", lambda *_: (3.25, 1.5))
    model = nn.TransformerEncoderLayer(64, 4, 64)
    plan = pf.plan(model, 8, example=torch.randn(5, 2, 64), measure=True)
    assert all(e.ms == (3.25, 1.5) for e in plan)
    rows = [line for line in str(plan).splitlines() if "3.25→1.5" in line]
    assert [row.split()[0] for row in rows] == ["self_attn.q", "linear1", "linear2"]
