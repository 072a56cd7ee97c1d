"""A bench: its runs, timed rounds and table; resuming and tuning; failed runs and bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from pufferfish.cli import main
from pufferfish.lab.bench import BenchSettings, bench
from pufferfish.lab.bench.bench import terminal_table
from pufferfish.lab.bench.bench_settings import (
    TUNE_SEED,
    BenchRun,
    TunedRate,
    best_rate,
    is_finished,
    load_settings,
    rate_grid,
    untried_rates,
)
from pufferfish.lab.bench.timing import to_final_model, write_summary
from pufferfish.lab.method_name import training_method
from pufferfish.lab.report import report
from pufferfish.lab.tasks import find_task
from pufferfish.lab.train import RunSettings, train
from pufferfish.layers import LowRankLinear
from pufferfish.measure import read_run

TASK = "digits:mlp,width=16"
SMALL = BenchSettings(task=TASK, methods=("pufferfish",), epochs=1, rounds=1)

MINE = """
from dataclasses import dataclass
from pufferfish.compression import BFloat16, PowerSGD

@dataclass(frozen=True)
class Mine(PowerSGD):
    pass

@dataclass(frozen=True)
class Broken(BFloat16):
    def compress(self, x, turn):
        raise RuntimeError("it breaks here")
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def words(out: Path, *more: str) -> list[str]:
    return ["bench", TASK, "--epochs", "1", "--rounds", "1", "--out", str(out), *more]


def finished_at(root: Path) -> dict[str, str | None]:
    return {str(p.parent.relative_to(root)): read_run(p.parent).finished for p in root.rglob("run.json")}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_bench_of_real_workers(tmp_path: Path, mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Models, compression, pruning and optimizers on two workers; a run that fails is named and the others continue."""
    out, bird = tmp_path / "out", "early-bird(0.5)"
    broken, own = f"{mine}:Broken", f"{mine}:Mine(rank=1)"
    methods = ["dense", "bf16", "pufferfish", own, bird, "dense(optimizer=sam)"]
    words = [
        "bench",
        "digits:width=8",
        "--epochs",
        "2",
        "--rounds",
        "1",
        "--out",
        str(out),
        "--per-node",
        "2",
    ]
    assert main([*words, "--methods", ",".join([broken, *methods])]) == 1
    shown = capsys.readouterr()
    failed = BenchRun(broken, 0).name
    assert f"{failed} failed: " in shown.err
    assert "it breaks here" in shown.err
    assert f"not finished: {failed}" in shown.err
    assert not is_finished(out / failed)
    assert f"[{len(methods) + 1}/{len(methods) + 1}]" in shown.err
    lines = [line.split("  ")[0] for line in shown.out.splitlines()]
    assert lines[2:11] == ["method", "dense", "bf16", broken, *methods[2:], "no exchange"]
    runs = {name: read_run(out / BenchRun(name, 0).name) for name in methods}
    assert all(run.finished and run.name == name and run.workers == 2 for name, run in runs.items())
    (timings,) = [json.loads(path.read_text()) for path in (out / "timing").iterdir()]
    assert list(timings["methods"]) == methods
    assert all(timings["predicted"][name]["seconds"] > 0 for name in methods)
    parameters = {name: run.results["parameters"] for name, run in runs.items()}
    sent = {name: timings["methods"][name]["bytes"] for name in methods}
    assert sent["bf16"] == pytest.approx(sent["dense"] / 2, rel=0.02)
    for name in ("pufferfish", bird):
        assert sent[name] / sent["dense"] == parameters[name] / parameters["dense"] < 1
    assert sent["dense(optimizer=sam)"] == sent["dense"]  # only one of its two passes is sent
    page = (out / "report.html").read_text()
    assert "no exchange" in page
    assert "All methods take turns in each round" in page


@pytest.mark.timeout(60)
def test_more_seeds_and_methods_are_more_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "--methods", "dense")) == 0
    before = finished_at(tmp_path)
    assert before.keys() == {"runs/dense/seed-0"}
    capsys.readouterr()
    assert main(words(tmp_path, "--methods", "pufferfish", "--seeds", "2")) == 0
    after = finished_at(tmp_path)
    assert {name: after[name] for name in before} == before
    assert after.keys() == {f"runs/{m}/seed-{s}" for m in ("dense", "pufferfish") for s in (0, 1)}
    assert "±" in capsys.readouterr().out
    assert main(words(tmp_path, "--methods", "pufferfish", "--seeds", "2")) == 0  # nothing is left to do
    assert finished_at(tmp_path) == after
    assert len(list((tmp_path / "timing").iterdir())) == 2
    assert "[" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_stopped_and_started_again(tmp_path: Path) -> None:
    """Ctrl-C ends the workers with a checkpoint; the same command resumes and finishes."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pufferfish", *words(out, "--methods", "dense", "--per-node", "2")]
    command[command.index("--epochs") + 1] = "12"
    stopped = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    while not list(out.glob("runs/dense/seed-0/checkpoints/*-step-*")):
        assert stopped.poll() is None
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=100)
    assert stopped.returncode == 130
    assert "rerun the same command to resume" in said
    assert "Traceback" not in said
    assert not is_finished(out / "runs/bf16/seed-0")
    subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=100
    )
    assert is_finished(out / "runs/dense/seed-0")
    steps = [step for _, step, _ in read_run(out / "runs/dense/seed-0").metrics["valid/accuracy"]]
    assert steps == sorted(set(steps))
    assert len(steps) == 12


@pytest.mark.timeout(120)
def test_learning_rates_are_chosen_on_validation_data(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, tune=3)
    assert bench(settings, tmp_path) == []
    message = json.loads((tmp_path / "bench.json").read_text())["rates"]
    for method in settings.methods:
        tried = {lr: read_run(tmp_path / BenchRun(method, lr=lr).name) for lr in rate_grid(0.1, 3)}
        scores = {lr: run.metrics["valid/accuracy"][-1][2] for lr, run in tried.items()}
        assert {run.seed for run in tried.values()} == {TUNE_SEED}
        chosen = read_run(tmp_path / BenchRun(method, 0).name).settings["recipe"]["lr"]
        assert scores[chosen] == max(scores.values())
        assert message[method]["lr"] == chosen
        edge = chosen in (min(scores), max(scores))
        assert bool(message[method]["edge"]) == edge
        assert (f"{method}: its best learning rate" in terminal_table(tmp_path)) == edge
        assert (f"{method}: its best learning rate" in (tmp_path / "report.html").read_text()) == edge
    shown = report([tmp_path], markdown=True)
    assert "lr-" not in shown
    assert str(TUNE_SEED) not in shown  # trials are not among the seeds


def test_which_rates_are_tried() -> None:
    """Always all but the outermost ones; these only beside the best rate, so that it is not at the edge of what was tried."""
    grid = rate_grid(0.1, 6)

    def tried(best: int, finite: int = 6) -> list[float]:
        """Rates that are tried if the best one is `best`, and those from `finite` on diverge."""
        scores: dict[float, float | None] = {}
        while missing := untried_rates(grid, scores, True):
            scores |= {lr: -abs(grid.index(lr) - best) if grid.index(lr) < finite else None for lr in missing}
        return sorted(scores)

    assert [tried(best) for best in (2, 3)] == [grid[1:5]] * 2
    assert [tried(best) for best in (0, 1)] == [grid[:5]] * 2
    assert [tried(best) for best in (4, 5)] == [grid[1:]] * 2
    assert tried(3, finite=2) == grid[:5]
    assert tried(3, finite=1) == tried(3, finite=0) == grid[:5]
    for count in (0, 2, 3):
        assert untried_rates(rate_grid(0.1, count), {}, True) == rate_grid(0.1, count)


def test_the_best_rate() -> None:
    peak = dict(zip(rate_grid(0.1, 5), (None, 4.0, 5.0, 5.0, float("nan")), strict=True))
    rates = [
        rate and (rate.lr, rate.edge) for rate in (best_rate(peak, higher, 0.1) for higher in (True, False))
    ]
    assert rates == [(0.1, ""), (0.05, "")]
    assert best_rate(dict.fromkeys(peak), True, 0.1) is None


def rounds_like(root: Path, target_link: str | None = None) -> list[dict[str, Any]]:
    """Three rounds of made-up figures in place of those that were timed; the last lacks a method."""
    made = []
    shutil.rmtree(root / "timing", ignore_errors=True)
    for n, dense in enumerate((2.0, 3.0, 5.0)):
        seconds = {"dense": dense, "bf16": dense / 1.5} | ({"pufferfish": dense / (2 + n)} if n < 2 else {})
        made.append({
            "steps": {}, "link": None, "target_link": target_link,
            "predicted": {name: {"seconds": 1.1 * s, "exchange": 0.1} for name, s in seconds.items()},
            "methods": {
                name: {"seconds": s, "compute_seconds": s / 2, "bytes": 100, "messages": 2, "parts": {"forward": s, "hidden": 0}}
                for name, s in seconds.items()
            },
        })  # fmt: skip
        (root / "timing").mkdir(exist_ok=True)
        (root / f"timing/round-{n}.json").write_text(json.dumps(made[-1]))
    return made


def test_the_summary_of_rounds(tmp_path: Path) -> None:
    rounds_like(tmp_path)
    write_summary(tmp_path, SMALL.methods, {"dense": TunedRate(0.4, {0.2: 1.0, 0.4: 2.0})})
    found = json.loads((tmp_path / "summary.json").read_text())["methods"]
    low = found["pufferfish"]["results"]
    assert low["seconds_a_step"] == statistics.median([2.0 / 2, 3.0 / 3])
    assert low["rounds"]["against"]["dense"][1] == 2.5
    assert low["rounds"]["against"]["bf16"][1] == pytest.approx(2.5 / 1.5)
    assert found["dense"]["results"]["rounds"]["seconds"] == [2.5, 3.0, 4.0]
    assert "highest of the 2" in found["dense"]["results"]["notes"][0]
    assert found["no exchange"]["results"]["seconds_a_step"] == 1.5
    assert found["no exchange"]["results"]["rounds"]["against"]["dense"] == [2.0, 2.0, 2.0]
    assert found["pufferfish"]["predicted"]["seconds_a_step"] == pytest.approx(1.1)


@pytest.mark.timeout(60)
def test_steps_of_a_link_that_could_not_be_emulated_are_predicted(tmp_path: Path) -> None:
    bench(SMALL, tmp_path)
    rounds_like(tmp_path, target_link="20mbit")
    write_summary(tmp_path, SMALL.methods, {})
    shown = terminal_table(tmp_path)
    assert "Steps are predicted for 20mbit" in " ".join(shown.split())
    row = next(line for line in shown.splitlines() if line.startswith("pufferfish"))
    assert "1.1 s (predicted)" in row
    narrow = terminal_table(tmp_path, width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert re.search("left out: .*MACs", narrow)
    assert "predicted for 20mbit" in report([tmp_path])


FROZEN = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    model[0].requires_grad_(False)
    return model

def data():
    return (torch.ones(128, 8), torch.arange(128) % 4), (torch.ones(8, 8), torch.arange(8) % 4)
"""


@pytest.mark.timeout(60)
def test_gradients_of_frozen_parameters_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "frozen.py").write_text(FROZEN)
    task = str(tmp_path / "frozen.py")
    settings = BenchSettings(task=task, methods=(), epochs=2, per_node=2, simulate=True)
    assert bench(settings, tmp_path / "bench") == []
    dense, bf16 = (read_run(tmp_path / "bench" / BenchRun(name, 0).name).results for name in settings.methods)
    assert dense["bytes"] == dense["updates"] * 4 * (64 * 4 + 4)  # two workers: 2 · 1/2
    assert bf16["bytes"] == pytest.approx(dense["bytes"] / 2, rel=0.1)


def test_the_timed_model_is_the_trained_one(tmp_path: Path) -> None:
    """Layers that share an input compute together in both."""
    task = find_task("text:d=64,layers=2,heads=2,context=8")
    tiny.text(tmp_path)
    recipe = dataclasses.replace(task.recipe("short"), epochs=2, switch_at=1, batch=4)
    given = RunSettings(training_method("pufferfish"), recipe, tmp_path / "run", data=tmp_path, quiet=True)
    train(task, given)
    change = to_final_model("pufferfish", task, recipe, task.load(tmp_path), given.folder)
    model = task.build()
    assert change is not None
    change(model, torch.optim.SGD(model.parameters(), lr=0.1))
    q, k, v = (model.get_submodule(f"blocks.1.attention.{name}") for name in "qkv")
    assert isinstance(q, LowRankLinear)
    assert q._shared_input is not None
    assert q._shared_input.layers == (q, k, v)


def test_a_folder_never_mixes_what_cannot_be_compared(tmp_path: Path) -> None:
    SMALL.save(tmp_path)
    more = dataclasses.replace(SMALL, methods=("auto",), seeds=3).merge_saved(tmp_path)
    assert more.methods == ("dense", "pufferfish", "auto")
    assert more.seeds == 3
    for change in ({"epochs": 3}, {"task": "digits"}, {"tune": 3}, {"nodes": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} was .*, now .*Choose another folder"):
            dataclasses.replace(SMALL, **change).merge_saved(tmp_path)  # type: ignore[arg-type]
    assert load_settings(tmp_path) == SMALL


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "puffer"], "there is no puffer"),
        (["--seeds", "0"], "--seeds 0"),
        (["--tune", "1"], "at least 2 learning rates"),
        (["--nodes", "3"], "equally over 3 workers"),
        (["--network", "1gbit"], "a single machine has no link"),
        (["--network", "10gbit", "--nodes", "2"], "too fast to be emulated"),
        (["--batch", "100000"], "training images"),
        (["--out", "."], "not empty, and not"),
    ],
)
def test_bad_input_is_one_line(
    more: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("not a bench's")
    assert main(["bench", TASK, *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
