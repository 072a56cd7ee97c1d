"""Options of low-rank methods in the lab: the moment, the rank, dense layers, Frobenius decay, and the way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pufferfish as pf
from pufferfish.cli import main
from pufferfish.lab.bench.bench_settings import BenchRun, load_settings
from pufferfish.lab.bench.timing import untimed_methods
from pufferfish.lab.method_name import training_method
from pufferfish.lab.model_change import build_model_change
from pufferfish.lab.tasks import find_task
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.step import build_components
from pufferfish.measure import read_run

TASK = find_task("digits:mlp,width=16")
RECIPE = replace(TASK.recipe("short"), epochs=4, batch=128, weight_decay=0.01)
UPDATES = 10  # of an epoch


def settings(method: str, folder: Path, **more: Any) -> RunSettings:
    given = RunSettings(training_method(method), RECIPE, folder, quiet=True)
    return replace(given, **more)


def results(method: str, folder: Path, **more: Any) -> dict[str, Any]:
    found = train(TASK, settings(method, folder, **more))
    assert found is not None
    return found


def losses(folder: Path) -> list[float]:
    return [value for _, _, value in read_run(folder).metrics["valid/loss"]]


def test_options_are_those_of_the_recipe(tmp_path: Path) -> None:
    one = results("pufferfish(at=0.5,rank=0.5)", tmp_path / "one")
    other = results("pufferfish", tmp_path / "other", recipe=replace(RECIPE, switch_at=2, rank=0.5))
    assert losses(tmp_path / "one") == losses(tmp_path / "other") != []
    assert one["parameters"] == other["parameters"]
    assert one["low_rank_updates"] == 2 * UPDATES
    kept = results("pufferfish(at=0.5,rank=0.5,keep=fc1|fc3)", tmp_path / "kept")
    assert kept["parameters"] > one["parameters"]
    ranks = {layer["name"]: layer["rank"] for layer in read_run(tmp_path / "kept").layers}
    assert [name for name, rank in ranks.items() if rank is not None] == ["fc2"]


def test_a_run_of_one_epoch_says_that_it_has_no_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "train",
                "digits:mlp,width=64",
                "--method",
                "pufferfish",
                "--epochs",
                "1",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    assert "Switched to low rank before epoch 1, without a warm-up: " in capsys.readouterr().err


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    file, method = tmp_path / "plan.json", f"pufferfish(at=0.5,plan={tmp_path / 'plan.json'})"
    with pytest.raises(FileNotFoundError, match=r"plan\.json"):
        results(method, tmp_path / "run")
    pf.plan(torch.nn.Sequential(torch.nn.Linear(64, 64)), 0.5).save(file)
    with pytest.raises(
        ValueError, match=r"plan\.json is a plan for another model: 0: the plan has this layer"
    ):
        results(method, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    pf.plan(TASK.build(), 0.5, keep=["fc1", "fc3"]).save(file)
    found = results(method, tmp_path / "run")
    other = results("pufferfish(at=0.5,rank=0.5,keep=fc1|fc3)", tmp_path / "other")
    assert losses(tmp_path / "run") == losses(tmp_path / "other") != []
    assert found["parameters"] == other["parameters"]
    pf.plan(TASK.build(), 0.5, keep=TASK.keep).save(file)
    with pytest.raises(
        ValueError, match=r"run with plan plan\.json@\w{12}, not plan\.json@\w{12}; choose another"
    ):
        results(method, tmp_path / "run")


def test_full_rank_finish(tmp_path: Path) -> None:
    dense = results("dense", tmp_path / "dense")
    found = results("pufferfish(at=0.25,back=0.75)", tmp_path / "back")
    plain = results("pufferfish(at=0.25)", tmp_path / "plain")
    assert found["parameters"] == dense["parameters"] > plain["parameters"] == found["low_rank_parameters"]
    assert (found["low_rank_updates"], found["updates_before_change"]) == (2 * UPDATES, 3 * UPDATES)
    assert losses(tmp_path / "back")[:2] == losses(tmp_path / "plain")[:2]
    assert losses(tmp_path / "back")[3] != losses(tmp_path / "plain")[3]


def test_frobenius_decay(tmp_path: Path) -> None:
    """The same weights as with a `pf.lowrank.FrobeniusDecay` of that strength."""

    def trained(method: str, strength: float) -> list[torch.Tensor]:
        given = settings(method, tmp_path, recipe=replace(RECIPE, epochs=1))
        data = TASK.load(None)
        components = build_components(TASK, given, data, 0, 1, torch.device("cpu"))
        if strength:
            pf.lowrank.FrobeniusDecay(components.model, components.optimizer, strength)
        assert build_model_change(components, UPDATES).begin_epoch(0)
        for batch in TASK.batches(data, "train", RECIPE.batch, generator=torch.Generator().manual_seed(0)):
            TASK.loss(components.module, batch, RECIPE).backward()
            components.optimizer.step()
            components.optimizer.zero_grad()
        return [p.detach() for p in components.module.parameters()]

    wanted, plain = (trained("pufferfish(at=0)", strength) for strength in (0.05, 0.0))
    found = trained("pufferfish(at=0,frobenius=0.05)", 0.0)
    assert all(map(torch.equal, found, wanted))
    assert not all(map(torch.equal, found, plain))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pufferfish(rate=1)",
            "rate=1 is not an option of pufferfish; choose from rank, at, keep, plan, frobenius, back",
        ),
        (
            "pufferfish(plan=a.json,rank=0.5)",
            "the plan has layers and ranks; remove rank= and keep=, or plan=",
        ),
        ("auto(rank=0.5)", "rank=0.5 is not an option of auto"),
        ("pufferfish(at=1)", "at=1 must be a fraction between 0 and 1"),
        ("pufferfish(back=x)", "back=x must be a fraction"),
        ("pufferfish(frobenius=-1)", "frobenius=-1 must be a number of at least 0"),
    ],
)
def test_wrong_options(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training_method(text)


def test_global_scope(tmp_path: Path) -> None:
    layer, everywhere = training_method("topk(0.01)"), training_method("auto+topk(0.01,scope=global)")
    assert (layer.compression.scope, everywhere.compression.scope) == ("layer", "global")
    assert everywhere.model == "auto"
    with pytest.raises(ValueError, match="global"):
        training_method("powersgd(4,scope=global)")
    short: dict[str, Any] = {"recipe": replace(RECIPE, epochs=1), "simulate": 2}
    one, other = (
        results(f"topk(0.01,scope={scope})", tmp_path / scope, **short) for scope in ("layer", "global")
    )
    assert one["loss"] != other["loss"]


def test_momentum_of_the_method_replaces_that_of_the_optimizer(tmp_path: Path) -> None:
    recipe = replace(RECIPE, epochs=1, momentum=0.9, nesterov=True)
    given = settings("dgc(0.9)", tmp_path / "dgc", recipe=recipe, simulate=2)
    groups = build_components(TASK, given, None, 0, 1, torch.device("cpu")).optimizer.param_groups
    assert [(g["params"][0].dim(), g["momentum"], g["nesterov"]) for g in groups] == [
        (2, 0.0, False),
        (1, 0.9, True),
    ]
    assert train(TASK, given) is not None  # refused with both


def test_a_plan_in_a_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run and its timed steps have the layers of the plan; a plan for another model is refused by name."""
    monkeypatch.chdir(tmp_path)
    pf.plan(TASK.build(), 0.5, keep=["fc1", "fc3"]).save("plan.json")
    method = "pufferfish(at=0,plan=plan.json)"
    words = ["bench", "digits:mlp,width=16", "--epochs", "1", "--rounds", "1", "--methods", method]
    assert main([*words, "--out", "out"]) == 0
    shown = capsys.readouterr()
    assert method in shown.out
    run = read_run(tmp_path / "out" / BenchRun(method, 0).name)
    assert run.settings["plan"].startswith("plan.json@")
    assert [layer["name"] for layer in run.layers if layer["rank"] is not None] == ["fc2"]
    assert untimed_methods(load_settings(tmp_path / "out"), tmp_path / "out") == []
    pf.plan(torch.nn.Sequential(torch.nn.Linear(64, 64)), 0.5).save("plan.json")
    assert main([*words, "--out", "other"]) == 1
    assert "plan.json is a plan for another model" in capsys.readouterr().err
