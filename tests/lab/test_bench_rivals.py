"""Pruning methods and optimizers in a bench: their final models are timed, and the table shows their whole cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pufferfish.cli import main
from pufferfish.lab.bench import BenchSettings, bench
from pufferfish.lab.bench.bench_settings import BenchRun, bench_runs, load_settings, rate_grid
from pufferfish.lab.bench.timing import models_to_time
from pufferfish.lab.report import report
from pufferfish.lab.train.timing import TimedModel
from pufferfish.measure import read_run

TASK = "digits:width=4"
LOTTERY, BIRD = "lottery-ticket(1)", "early-bird(0.5)"
ALL = ["dense", "pufferfish", "auto", LOTTERY, BIRD, "dense(optimizer=lars,lr=1)"]

MINE = """
from dataclasses import dataclass
from pufferfish.compression import BFloat16

@dataclass(frozen=True)
class Mine(BFloat16):
    pass
"""


def rounds(root: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["methods"] for path in sorted((root / "timing").iterdir())]


def final_models(root: Path, *methods: str) -> dict[str, TimedModel]:
    """The models that are timed in a finished bench of one worker."""
    settings = load_settings(root)
    data = settings.resolve()[0].load(None)
    return models_to_time(methods, settings, root, data, worker=0, workers=1, device=torch.device("cpu"))


@pytest.mark.timeout(120)
def test_a_bench_of_one_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's two tables in one, small."""
    root = tmp_path / "out"
    words = ["bench", TASK, "--epochs", "2", "--rounds", "1", "--methods", ",".join(ALL), "--out", str(root)]
    assert main(words) == 0
    check_table(root, capsys.readouterr().out)
    check_final_models(root)


def check_table(root: Path, shown: str) -> None:
    lines = shown.splitlines()
    assert lines[2].split("  ")[0] == "method"
    heads = [head.strip() for head in lines[2].split("  ") if head]
    assert heads == [
        "method", "parameters", "MACs", "accuracy, %", "difference", "step time", "step speedup", "run time", "run speedup",
        "peak memory", "seeds",
    ]  # fmt: skip
    table = {line.split()[0]: [x for x in line.split("  ") if x] for line in lines[3:9]}
    assert list(table) == ALL  # one worker has nothing to send in bf16
    results = {name: read_run(root / BenchRun(name, 0).name).results for name in table}
    speedup = results["dense"]["training_seconds"] / results[LOTTERY]["training_seconds"]
    shown_speedup = table[LOTTERY][heads.index("run speedup")].partition("×")[0]
    assert float(shown_speedup) == pytest.approx(speedup, abs=0.006)
    text = " ".join(shown.split())
    assert f"{LOTTERY}: its run time includes 2 trainings." in text
    assert "not as many steps" not in text
    for page in (shown, (root / "report.html").read_text()):
        assert "no exchange" not in page
        assert "bytes per step" not in page
        assert "bytes/step" not in page
    assert '<th scope="row">mode</th><td class="">eager</td>' in (root / "report.html").read_text()
    assert f"| {BIRD} | {results[BIRD]['parameters']:,} |" in report([root], markdown=True)
    (timings,) = rounds(root)
    assert set(timings) == set(table)
    assert all("compute_seconds" not in timing for timing in timings.values())


def check_final_models(root: Path) -> None:
    """A pruned model is timed as it is at the end of its run."""
    models = final_models(root, "dense", LOTTERY, BIRD)
    for model in models.values():
        model.step()
    results = {name: read_run(root / BenchRun(name, 0).name).results for name in models}
    for name in ("dense", BIRD):
        assert sum(p.numel() for p in models[name].inner.parameters()) == results[name]["parameters"]
    recipes = [
        read_run(root / BenchRun(name, 0).name).settings["recipe"]
        for name in ("dense", "dense(optimizer=lars,lr=1)")
    ]
    assert [(recipe["optimizer"], recipe["lr"]) for recipe in recipes] == [("sgd", 0.03), ("lars", 1.0)]
    assert results[BIRD]["parameters"] < results["dense"]["parameters"]
    shapes = {name: [p.shape for p in model.inner.parameters()] for name, model in models.items()}
    assert shapes[LOTTERY] == shapes["dense"] != shapes[BIRD]
    weights = [p for p in models[LOTTERY].inner.parameters() if p.dim() > 1]
    left = results[LOTTERY]["trainings"][-1]["weights"]
    assert sum(int(p.count_nonzero()) for p in weights) == left < sum(p.numel() for p in weights)


def test_every_optimizer_tries_rates_of_its_own_size() -> None:
    settings = BenchSettings(
        task="digits", methods=("dense(optimizer=lars,lr=1.6)", "dense(optimizer=sam)"), tune=3
    )
    tried: dict[str, list[float | None]] = {}
    for run in bench_runs(settings, settings.resolve()[1]):
        if run.lr is not None:
            tried.setdefault(run.method, []).append(run.lr)
    assert tried == {
        "dense": rate_grid(0.03, 3),
        "dense(optimizer=lars,lr=1.6)": rate_grid(1.6, 3),
        "dense(optimizer=sam)": rate_grid(0.03, 3),
    }


@pytest.mark.timeout(60)
def test_simulated_workers_have_a_ceiling_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = BenchSettings(
        task="digits:mlp,width=8", methods=(), epochs=1, per_node=2, simulate=True, network="10mbit"
    )
    assert bench(settings, tmp_path) == []
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("no exchange"))
    assert "predicted" in line
    metrics = read_run(tmp_path / BenchRun("dense", 0).name).metrics
    step, exchange = (metrics[f"predicted/{name}"][-1][2] for name in ("step", "exchange"))
    found = json.loads((tmp_path / "summary.json").read_text())["methods"]["no exchange"]
    assert found == {"results": {}, "predicted": {"seconds_a_step": pytest.approx(step - exchange)}}
    assert 0 < exchange < step


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("digits:mlp", ["--methods", "early-bird(0.5)"], "no channels are scaled by a batch norm"),
        (TASK, ["--methods", "early-bird(0.5)", "--epochs", "1"], "drawn between epochs"),
        (
            TASK,
            ["--methods", "dense(optimizer=lars)"],
            "give its lr, too, as in dense(optimizer=lars,lr=1.6)",
        ),
        (TASK, ["--methods", "dense(optimizer=lion)"], "optimizer=lion is not one of sgd"),
        (TASK, ["--methods", "dense(optimizer=lars,lr=-1)"], "lr=-1 must be a positive number"),
        (
            TASK,
            ["--methods", "dense(optimizer=sam)", "--per-node", "2", "--simulate"],
            "each worker perturbs its own weights",
        ),
    ],
)
def test_bad_input_is_one_line(
    task: str, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", task, *more, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
