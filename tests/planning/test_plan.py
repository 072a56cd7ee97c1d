"""A plan as text and as JSON, and models that it does not fit."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import pufferfish as pf
from matrices import blocks
from pufferfish.lab.models import resnet18
from pufferfish.planning.text import plan_table


class Special(nn.Linear):
    """A type of the user's own."""


# Text.


def test_the_table() -> None:
    model = resnet18(channels=16)
    model.layer1[0].conv1.requires_grad_(False)
    plan = pf.plan(
        model, keep=["conv1", "fc"], overrides={"layer4.*": pf.Energy(0.9)}, example=torch.randn(2, 3, 16, 16)
    )
    text = plan_table(plan)
    lines = text.splitlines()
    assert " ".join(lines[0].split()) == "layer type shape rank weights MACs bytes note"
    assert len(lines[1 : lines.index("")]) == len(plan.entries)
    assert "energy 0.9" in text
    assert "5 ranks are chosen from the weights when the plan is applied" in text
    row = next(line for line in lines if line.startswith("layer1.0.conv1 "))
    assert " 0.0% " in f"{row} "  # frozen: none of the bytes
    for label in (
        "parameters",
        "MACs forward",
        "MACs backward",
        "gradient bytes (DDP)",
        "FSDP2 bytes",
        "memory, Adam",
    ):
        assert any(line.startswith(label) for line in lines)
    assert f"{plan.before.parameters:,}" in text
    assert f"{plan.after.parameters:,}" in text
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[1 : lines.index("")]]
    vectors = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert sum(shares) == pytest.approx(100 * (1 - vectors / plan.after.trainable), abs=1.5)


def test_the_table_after_factorizing_has_errors() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    W = model[0].weight.detach().clone()
    plan = pf.factorize_(model, pf.plan(model))
    relative = (W - model[0].weight.detach()).norm() / W.norm()
    assert plan["0"].error == pytest.approx(float(relative), rel=1e-4)
    assert "error" in str(plan).splitlines()[0]
    assert f"{float(relative):.3f}" in str(plan)


def test_errors_fit_80_columns() -> None:
    """Of the columns that have to be left out, errors are the last."""
    block = nn.ModuleDict(
        {"self_attn": nn.ModuleDict({"q_proj": nn.Linear(192, 192), "k_proj": nn.Linear(192, 64)})}
    )
    model = nn.ModuleDict(
        {"model": nn.ModuleDict({"layers": nn.ModuleList(copy.deepcopy(block) for _ in range(12))})}
    )
    for p in model.parameters():
        nn.init.normal_(p)
    plan = pf.plan(
        model,
        0.5,
        example=lambda m: [x["self_attn"]["q_proj"](torch.ones(192)) for x in m["model"]["layers"]],
    )
    table = str(pf.factorize_(model, plan)).partition("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert "MACs" not in table[0]
    assert "error" in table[0]


# JSON.


def rich_plan() -> pf.Plan:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(64, 64, 3, groups=2),
            "up": nn.ConvTranspose1d(64, 64, 3),
            "a": nn.MultiheadAttention(64, 4),
            "lstm": nn.LSTM(64, 64),
            "emb": nn.Embedding(5, 4),
            "lazy": nn.LazyLinear(4),
        }
    )
    return pf.plan(
        model,
        overrides={"a.q": pf.StableRank({"a.q": 3.0}), "lstm.weight_ih_l0": pf.Budget(params=1e5), "up": 5},
        keep=["lstm.weight_hh_l0"],
        example=lambda m: m["conv"](torch.randn(1, 64, 8, 8)),
    )


def test_json_round_trip(tmp_path: Path) -> None:
    plan = rich_plan()
    again = pf.Plan.from_json(plan.to_json())
    assert again == plan
    assert (again.hash, str(again), again.after) == (plan.hash, str(plan), plan.after)
    plan.save(tmp_path / "plan.json")
    assert pf.Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["pufferfish_plan"] == 1


def test_json_of_another_version() -> None:
    data = json.loads(rich_plan().to_json())
    with pytest.raises(
        ValueError,
        match="not a plan of version 1 but of version 2; use the pufferfish version that saved it",
    ):
        pf.Plan.from_json(json.dumps({**data, "pufferfish_plan": 2}))
    with pytest.raises(ValueError, match=r"not a plan; pass what plan\.save"):
        pf.Plan.from_json(json.dumps({"model": "resnet"}))


def damage(change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(rich_plan().to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("entries"), "damaged: 'entries'"),
        (lambda d: d.pop("before"), "damaged: 'before'"),
        (lambda d: d.update(entries=5), "damaged"),
        (lambda d: d.update(before={}), "damaged.*parameters"),
        (lambda d: d["entries"][0].pop("name"), "damaged.*name"),
        (lambda d: d["entries"][0].update(colour="red"), "damaged.*colour"),
        (lambda d: d["entries"][0]["matrix"].update(m=7), "damaged"),
        (lambda d: d["entries"][2]["rule"].update(rule="Oracle"), "unknown rank rule 'Oracle'"),
        (lambda d: d["entries"][2]["rule"].update(keep=1), "damaged"),
        (lambda d: d["entries"][0].update(rank=0), "conv: rank 0 is not a whole number from 1 to 32"),
        (lambda d: d["entries"][0].update(rank=33), "conv: rank 33 is not a whole number from 1 to 32"),
        (lambda d: d["entries"][0].update(rank=4.0), "conv: rank 4.0 is not a whole number"),
        (lambda d: d["entries"][-1].update(rank=1), "lazy: rank 1 is not a whole number from 1 to 0"),
    ],
)
def test_damaged_json(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pf.Plan.from_json(damage(change))


@pytest.mark.parametrize("text", ["", "[]", "null"])
def test_what_is_no_plan_at_all(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=r"p\.json: not a plan"):
        pf.Plan.load(tmp_path / "p.json")


def test_an_edited_rank_is_applied() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    data = json.loads(pf.plan(model, 8).to_json())
    data["entries"][0]["rank"] = 5
    data["entries"][1]["rank"] = None
    plan = pf.Plan.from_json(json.dumps(data))
    assert plan.after.parameters == 5 * 128 + 64 * 65 + 64
    pf.factorize_(model, plan)
    assert model[0].ranks == {"": 5}
    assert type(model[1]) is nn.Linear


def test_the_hash_covers_decisions_only() -> None:
    model = blocks()
    plan = pf.plan(model)
    same = [
        pf.plan(model, 16, keep=["2"]),  # another rule, another reason, the same ranks
        pf.plan(model, pf.Ratio(0.25, multiple=8), keep=["2"]),
        pf.plan(model, example=torch.randn(2, 64)),
        pf.plan(copy.deepcopy(model).bfloat16().requires_grad_(False), overrides={"*": 0.25}),
        pf.factorize_(copy.deepcopy(model), plan),
        plan.replace(reversed(plan.entries)),
    ]
    assert {p.hash for p in same} == {plan.hash}
    other = [
        pf.plan(model, 8),
        pf.plan(model, keep=["0.0"]),
        pf.plan(model, pf.Energy(0.5)),
        pf.plan(model, pf.Energy(0.6)),
        pf.plan(nn.Sequential(*blocks(), nn.Linear(10, 10))),
        pf.plan(nn.Sequential(*list(blocks())[:2], nn.Linear(64, 11))),
    ]
    assert len({plan.hash, *(p.hash for p in other)}) == 1 + len(other)


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "import torch, pufferfish as pf; from torch import nn;"
        "print(pf.plan(nn.Sequential(nn.Linear(64, 64), nn.Conv2d(32, 64, 3)), pf.Energy(0.5)).hash)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    here = pf.plan(nn.Sequential(nn.Linear(64, 64), nn.Conv2d(32, 64, 3)), pf.Energy(0.5)).hash
    assert ran.stdout.strip() == here


# Models that a plan does not fit.


def net(second: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), second)


Make = Callable[[], nn.Module]


def linear() -> nn.Module:
    return nn.Linear(64, 64)


MISFITS: list[tuple[Make, Make, str]] = [
    (linear, nn.ReLU, "1: the plan is for a Linear, the model has a ReLU"),
    (linear, lambda: nn.Conv2d(64, 64, 1), "1: the plan is for a Linear, the model has a Conv2d"),
    (linear, lambda: Special(64, 64), "1: the plan is for a Linear, the model has a Special"),
    (linear, lambda: nn.Linear(64, 48), "1: the plan is for a weight of 64×64 with a bias, the model has a weight of 48×64"),
    (linear, lambda: nn.Linear(64, 64, bias=False), "a bias, the model has a weight of 64×64 without a bias"),
    (
        lambda: nn.Conv2d(64, 64, 3, groups=2),
        lambda: nn.Conv2d(64, 64, 3, groups=4),
        "1: the plan is for a weight of 64×32×3×3 in 2 blocks with a bias, the model has a weight of 64×16×3×3 in 4",
    ),
    (
        lambda: nn.LSTM(64, 64, 2),
        lambda: nn.LSTM(64, 64),
        "1.weight_ih_l1: the plan is for a weight of 256×64 in 4 blocks without a bias, the model has no such weight",
    ),
    (
        lambda: nn.MultiheadAttention(64, 4),
        lambda: nn.MultiheadAttention(64, 4, kdim=32),
        "1.q: the plan is for a weight of 64×64 with a bias, the model",
    ),
    (lambda: nn.Sequential(nn.Linear(64, 64)), linear, "1.0: the plan has this layer, but the model does not"),
    (
        linear,
        lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
        "1: the plan is for a Linear, the model has a ParametrizedLinear",
    ),
    (linear, lambda: prune.identity(nn.Linear(64, 64), "weight"), "1: unsupported: its weight is computed"),
]  # fmt: skip


@pytest.mark.parametrize(("planned", "actual", "message"), MISFITS, ids=[m[:30] for *_, m in MISFITS])
@pytest.mark.parametrize("verb", [pf.factorize_, pf.reshape_])
def test_a_plan_for_another_model(
    planned: Make, actual: Make, message: str, verb: Callable[..., Any]
) -> None:
    plan = pf.plan(net(planned()), 4)
    model = net(actual())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    modules = dict(model.named_modules())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        verb(model, plan, optimizer)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_plan_applied_twice() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    plan = pf.plan(model)
    pf.factorize_(model, plan)
    with pytest.raises(
        ValueError, match="0: the plan is for a Linear, the model has a LowRankLinear; it is already low-rank"
    ):
        pf.factorize_(model, plan)


def test_a_type_that_is_no_longer_registered() -> None:
    model = net(Special(64, 64))
    plan = pf.plan(net(nn.Linear(64, 64)))
    renamed = plan.replace(
        pf.planning.Entry(**{**vars(e), "type": "Special"}) if e.name == "1" else e for e in plan.entries
    )
    with pytest.raises(
        ValueError, match=r"1: no low-rank form is registered for Special; call pufferfish\.register"
    ):
        pf.factorize_(model, renamed)


def test_rules_of_a_plan_for_another_model() -> None:
    plan = pf.plan(nn.Sequential(nn.Linear(64, 64)), pf.Energy(0.5))
    with pytest.raises(ValueError, match="0: the plan has a rule for this layer"):
        pf.resolve(plan, nn.Sequential(nn.ReLU()))
