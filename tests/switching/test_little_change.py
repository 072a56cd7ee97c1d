"""A switch that changes little or nothing says so: once, on the first worker, as early as it is known."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from matrices import forced
from processes import in_processes


class Own(nn.Linear):
    """A type that nobody has registered."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Own(64, 64) for _ in range(8)))


def run(model: nn.Module, switch: pf.Switch, steps: int = 4) -> list[list[str]]:
    """Texts of the warnings about what stays dense, by step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    texts = []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            switch.step(model, optimizer, step=step)
        texts.append([str(w.message) for w in caught if "What stays dense" in str(w.message)])
    return texts


def test_it_is_said_before_the_warm_up_and_in_the_report() -> None:
    switch, model = pf.Switch(rank=0.25, when=pf.AtStep(2)), build()
    (text,), *later = run(model, switch)
    assert later == [[], [], []]
    assert text.startswith("The plan changes nothing. What stays dense: 98% in Own: no low-rank form")
    assert "pf.register(" in text
    assert str(switch.report).splitlines() == [
        "The switch at step 2 changed no layer: 33,280 parameters",
        *text.splitlines(),
    ]


def test_an_ordinary_switch_says_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    switch = pf.Switch(rank=0.25, when=pf.AtStep(2))
    assert run(model, switch) == [[], [], [], []]
    assert str(switch.report).startswith(
        "Switched to low rank at step 2: 4,160 → 2,112 parameters\nworst layers"
    )


def test_linear_layers_of_a_transformers_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model, x = transformers.FalconForCausalLM(config), torch.arange(12).view(2, 6)
    (text,), *_ = run(model, pf.Switch(rank=0.25, when=pf.AtStep(0)), 1)
    first, line = text.splitlines()
    assert "% in FalconLinear: no low-rank form is registered" in first
    path = "transformers.models.falcon.modeling_falcon.FalconLinear"
    assert line.endswith(f': pf.register("{path}", pf.layers.LowRankLinear)')
    try:
        exec(line.partition("register it: ")[2], {"pf": pf})
        plan = forced(model, 64)  # full rank
        with torch.no_grad():
            expected: Tensor = model(x).logits
            pf.factorize_(model, plan)
            torch.testing.assert_close(model(x).logits, expected, atol=1e-4, rtol=0)
    finally:
        pf.layers.base._REGISTRY.pop(path)
    assert sum(isinstance(m, pf.layers.LowRankLinear) for m in model.modules()) == 4


def on_the_first_worker(rank: int, size: int) -> None:
    found = run(DDP(build()), pf.Switch(rank=0.25, when=pf.AtStep(2)))
    assert [len(texts) for texts in found] == [1 - rank, 0, 0, 0]


def test_only_the_first_worker_warns() -> None:
    in_processes(on_the_first_worker, 2)


def test_frozen_layers_do_not_make_ranks_look_settled() -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    switch = pf.Switch(when=pf.RanksSettle(latest=pf.AtStep(2)))
    run(model, switch)
    assert list(switch.initial or ()) == ["1"]
    assert [list(ranks) for ranks in switch.history] == [["1"]] * len(switch.history)
    assert switch.report is not None
    assert switch.report.plan["0"].reason.startswith("frozen")
    assert isinstance(model[1], pf.layers.LowRankLinear)
