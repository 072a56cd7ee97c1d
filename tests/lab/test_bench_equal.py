"""`bench --equal time` and `--equal bytes`: the number of updates, the stretched runs, their table; resuming."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from processes import in_processes
from pufferfish.cli import main
from pufferfish.distributed.workers import Workers
from pufferfish.lab.bench import BenchSettings, bench
from pufferfish.lab.bench.bench_runs import BenchRun
from pufferfish.lab.bench.bench_settings import load_settings
from pufferfish.lab.bench.find_length import find_length
from pufferfish.lab.bench.models_to_time import to_final_model
from pufferfish.lab.bench.terminal_table import terminal_table
from pufferfish.lab.network import LinkShape
from pufferfish.lab.report import report
from pufferfish.lab.tasks import find_task
from pufferfish.lab.train import RunSettings, timed_run, train
from pufferfish.lab.train.equal_length import EqualLength
from pufferfish.lab.train.training_method import training_method
from pufferfish.layers import LowRankLinear
from pufferfish.measure import Run, read_run

TASK = "digits:mlp,width=16"
PASS = 20  # updates in a pass over its data
CPU = torch.device("cpu")
FEW = {"ROUNDS": 1, "MAX_STEPS": 2, "WARM_UP": 1}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timing: here only what follows from it is of interest."""
    for name, value in FEW.items():
        monkeypatch.setattr(timed_run, name, value)


def length(root: Path, method: str, kind: str = "time") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / f"equal-{kind}" / method / "length.json").read_text())
    assert found["method"] == method
    return dict(found["length"])


def both(root: Path, method: str, seed: int, kind: str = "time") -> tuple[Run, Run]:
    """The runs at equal steps, and at equal time or bytes."""
    plain, equal = BenchRun(method, seed), BenchRun(method, seed, equal=kind)
    return read_run(root / plain.name), read_run(root / equal.name)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(step, value) for _, step, value in read_run(folder).metrics["loss"] if step % 20 == 0]


@pytest.mark.parametrize(
    ("name", "epochs"), [("digits:mlp", 1), ("digits:mlp", 5), ("wikitext2", 1), ("wikitext2", 23)]
)
def test_epochs_of_any_length_train_on_the_same_data(name: str, epochs: int, tmp_path: Path) -> None:
    """Two passes over the data as one epoch, or as many, are two epochs; an LSTM keeps its state between short epochs."""
    tiny.wikitext2(tmp_path)
    task = tiny.TINY[name].task
    recipe = replace(task.recipe("short"), epochs=2, batch=16 if name == "digits:mlp" else 4, lr=0.1)
    steps = task.steps(task.load(tmp_path), recipe.batch)
    assert 2 * steps % epochs == 0
    given = RunSettings(training_method("dense"), recipe, tmp_path / "plain", data=tmp_path, quiet=True)
    plain = train(task, given)
    equal = EqualLength(equal="time", steps_per_epoch=2 * steps // epochs, relative=1.0)
    given = replace(given, recipe=replace(recipe, epochs=epochs), folder=tmp_path / "equal")
    stretched = train(task, replace(given, equal_length=equal))
    assert plain is not None
    assert stretched is not None
    assert stretched["updates"] == plain["updates"] == 2 * steps
    assert stretched["loss"] == plain["loss"]
    assert losses(tmp_path / "equal") == losses(tmp_path / "plain") != []
    assert len(read_run(tmp_path / "equal").metrics["valid/loss"]) == epochs
    with pytest.raises(ValueError, match="steps_per_epoch"):
        train(task, replace(given, equal_length=replace(equal, steps_per_epoch=7)))
    with pytest.raises(ValueError, match="equal_length"):
        train(task, given)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("few_steps")
def test_equal_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", TASK, "--epochs", "3", "--rounds", "1", "--out", str(tmp_path / "out")]
    words += ["--methods", "pufferfish,narrow", "--equal", "time", "--stretch", "50"]
    out = tmp_path / "out"
    assert main([*words, "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    for method in ("pufferfish", "narrow"):
        found = length(out, method)
        seconds = found["seconds"]
        before, after = (20, 40) if method == "pufferfish" else (0, 60)
        total = before * seconds.get("before", 0.0) + after * seconds["after"]
        assert found["relative"] == pytest.approx(total / (60 * seconds["dense"]))
        assert found["steps_per_epoch"] == max(1, math.floor(PASS / found["relative"]))
        assert ("before" in seconds) == (method == "pufferfish")
        assert seconds.get("before", seconds["dense"]) == seconds["dense"]  # the same model
        for seed in (0, 1):
            plain, equal = both(out, method, seed)
            assert equal.settings["equal_length"] == found
            assert "equal_length" not in plain.settings
            assert equal.settings["recipe"] == plain.settings["recipe"]
            assert equal.results["updates"] == 3 * found["steps_per_epoch"]
            assert equal.results["updates_before_change"] * 3 == (before > 0) * equal.results["updates"]
            assert equal.results["parameters"] == plain.results["parameters"]
            rates = [lr for _, step, lr in equal.metrics["lr"] if step == equal.results["updates"]]
            recipe = find_task(TASK).recipe("short").override(epochs=3)
            assert rates == [
                pytest.approx(recipe.lr_at(equal.results["updates"] - 1, equal.results["updates"]))
            ]

    table = shown[shown.index("Equal time: accuracy, %") :].splitlines()
    assert [line.split()[0] for line in table[2:6]] == ["method", "dense", "pufferfish", "narrow"]
    rows = csv.DictReader(io.StringIO(report([out], "csv")))
    cells = {(r["row"], r["column"]): r["value"] for r in rows if r["table"] == "Equal time: accuracy, %"}
    dense = [read_run(out / BenchRun("dense", seed).name) for seed in (0, 1)]
    runs = [both(out, "narrow", seed) for seed in (0, 1)]
    differences = [
        equal.results["accuracy"] - base.results["accuracy"]
        for (_, equal), base in zip(runs, dense, strict=True)
    ]
    assert float(cells["3", "vs. dense"]) == pytest.approx(sum(differences) / 2)
    for column, at in (("equal steps", 0), ("equal time", 1)):
        scores = [pair[at].results["accuracy"] for pair in runs]
        assert float(cells["3", column]) == pytest.approx(sum(scores) / 2)
        assert float(cells["1", column]) == pytest.approx(sum(run.results["accuracy"] for run in dense) / 2)
    assert [float(cells[row, "updates"]) for row in "13"] == [60, runs[0][1].results["updates"]]
    share = float(cells["3", "time"]) / float(cells["1", "time"])  # of the time of dense
    found = length(out, "narrow")
    assert share == pytest.approx(found["relative"] * found["steps_per_epoch"] / PASS)
    page = (out / "report.html").read_text()
    assert "Equal time: accuracy, %" in page
    assert "accuracy at equal time, the best" in page
    assert "by updates timed in turns with dense on this device" in page
    assert "6 runs" not in page  # the others are counted too
    assert "10 runs" in page
    alone = report([out / "equal-time"], "markdown", against="narrow")
    assert f"| narrow | {runs[0][1].results['parameters']:,} |" in alone
    assert "Equal time" not in alone
    summary = json.loads((out / "summary.json").read_text())
    assert summary["equal"] == {m: length(out, m) for m in ("pufferfish", "narrow")}

    # More seeds use the same number of updates; nothing is measured or trained again.
    path = out / "equal-time" / "narrow" / "length.json"
    changed = json.loads(path.read_text())
    changed["length"]["steps_per_epoch"] = 5
    path.write_text(json.dumps(changed))
    finished = {p: p.read_bytes() for p in out.glob("*/*/*/run.json")}
    assert main([word for word in words if word not in ("--equal", "time")] + ["--seeds", "3"]) == 0
    assert both(out, "narrow", 2)[1].results["updates"] == 15
    assert all(p.read_bytes() == text for p, text in finished.items())


@pytest.mark.timeout(60)
def test_equal_bytes(tmp_path: Path) -> None:
    settings = BenchSettings(
        task=TASK, methods=("pufferfish", "powersgd-1"), epochs=3, per_host=2, simulate=True, equal="bytes", stretch=2.5
    )  # fmt: skip
    assert bench(settings, tmp_path) == []
    sent = read_run(tmp_path / BenchRun("dense", 0).name).results["bytes"]
    for method in ("bf16", "pufferfish"):
        run = both(tmp_path, method, 0, "bytes")[1]
        updates = run.results["updates"]
        assert 60 < updates < 120
        assert run.results["bytes"] <= sent < run.results["bytes"] / updates * (updates + 3)
        assert length(tmp_path, method, "bytes")["note"] == ""
    limited = both(tmp_path, "powersgd-1", 0, "bytes")[1].results
    assert limited["updates"] == 2.5 * 60
    assert limited["bytes"] < sent / 2
    shown = " ".join(terminal_table(tmp_path).split())
    assert "Equal bytes: accuracy, %" in shown
    assert "updates of dense fit; --stretch limits them to 2.5×" in shown
    assert "time, predicted" in shown
    assert "clock" not in shown


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
    settings = BenchSettings(
        task=str(tmp_path / "frozen.py"),
        methods=("bf16",),
        epochs=2,
        per_host=2,
        simulate=True,
        equal="bytes",
    )
    assert bench(settings, tmp_path / "bench") == []
    dense = read_run(tmp_path / "bench" / BenchRun("dense", 0).name).results
    assert dense["bytes"] == dense["updates"] * 4 * (64 * 4 + 4)  # two workers: 2 · 1/2
    assert length(tmp_path / "bench", "bf16", "bytes")["relative"] == pytest.approx(0.5, rel=0.1)


@pytest.mark.timeout(60)
def test_time_predicted_for_a_link(tmp_path: Path) -> None:
    """On a link so slow that nothing else takes time, equal time is equal bytes."""
    settings = BenchSettings(
        task=TASK, methods=("pufferfish",), epochs=3, hosts=2, network="1mbit", simulate=True, equal="time"
    )
    assert bench(settings, tmp_path) == []
    plain, equal = both(tmp_path, "pufferfish", 0)
    found, sent = (
        length(tmp_path, "pufferfish"),
        read_run(tmp_path / BenchRun("dense", 0).name).results["bytes"],
    )
    assert found["link"] == "1mbit"
    assert found["relative"] == pytest.approx(plain.results["bytes"] / sent, rel=0.05)
    assert equal.results["updates"] == 3 * math.floor(PASS / found["relative"])
    shown = " ".join(terminal_table(tmp_path).split())
    assert "by updates predicted for 1mbit" in shown
    assert "clock" not in shown


def on_workers(rank: int, size: int, folder: str) -> None:
    """Two workers find the same number of updates and train with it."""
    for name, value in FEW.items():
        setattr(timed_run, name, value)
    root, task, method = Path(folder), find_task(TASK), "pufferfish+powersgd-1"
    settings = BenchSettings(task=TASK, methods=(method,), epochs=2, per_host=size, equal="time")
    given = settings.run_settings(method, settings.resolve()[1], root / BenchRun(method, 0).name, quiet=True)
    train(task, given)
    workers = Workers.of_job("test", side_group=True)
    found = find_length(method, settings, root, task.load(None), workers, CPU)
    slow = find_length(method, settings, root, task.load(None), workers, CPU, LinkShape.parse("1mbit"))
    assert (found.link, slow.link) == ("", "1mbit")
    assert slow.relative < 0.5  # only a few bytes are sent
    for each in (found, slow):
        everyone = workers.gather(lambda each=each: [each.steps_per_epoch, each.relative, each.seconds])  # type: ignore[misc]
        assert everyone == [everyone[0]] * size
    assert found.seconds["before"] != found.seconds["dense"]  # it is compressed
    equal = BenchRun(method, 0, equal="time").name
    results = train(task, replace(given, folder=root / equal, equal_length=found))
    assert results is not None
    assert results["updates"] == 2 * found.steps_per_epoch


@pytest.mark.timeout(120)
def test_workers_agree_on_the_updates(tmp_path: Path) -> None:
    in_processes(on_workers, 2, str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_bench_of_real_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compression, pruning and other optimizers at equal time."""
    methods = ["bf16", "pufferfish+powersgd-1", "early-bird-0.5", "lottery-ticket-1", "dense@sam"]
    words = ["bench", "digits:width=8", "--epochs", "2", "--rounds", "1", "--out", str(tmp_path / "out")]
    words += ["--workers", "2", "--equal", "time", "--methods", ",".join(methods)]
    assert main(words) == 0
    for method in methods:
        plain, equal = both(tmp_path / "out", method, 0)
        steps = length(tmp_path / "out", method)["steps_per_epoch"]
        assert equal.workers == 2
        assert equal.results["updates"] * PASS == plain.results["updates"] * steps
    assert "Equal time: accuracy, %" in capsys.readouterr().out


class Sleeper:
    """Stands in for a `TimedRun` whose updates take `seconds`, in rounds of `period` updates."""

    def __init__(self, seconds: float, period: int = 1) -> None:
        self.time, self.steps, self.period, self.last = seconds, 0, period, 0

    def seconds(self, steps: int) -> float:
        self.steps += steps
        self.last = steps
        return self.time


def test_all_models_take_turns() -> None:
    runs: Any = [Sleeper(0.02), Sleeper(0.01), Sleeper(0.05)]
    assert timed_run.relative_times(runs, Workers.of_job("test")) == (0.02, [1.0, 0.5, 2.5])
    assert runs[0].steps == runs[1].steps == runs[2].steps > 0


def test_local_steps_are_timed_in_whole_rounds() -> None:
    runs: Any = [Sleeper(0.02), Sleeper(0.02, period=11)]
    timed_run.relative_times(runs, Workers.of_job("test"))
    assert runs[0].last <= runs[1].last < runs[0].last + 11
    assert runs[1].last % 11 == 0


def test_equal_time_may_be_added_to_a_bench(tmp_path: Path) -> None:
    plain = BenchSettings(task=TASK, methods=("pufferfish",), per_host=2)
    plain.save(tmp_path)
    timed = replace(plain, equal="time", stretch=3.0).merge_saved(tmp_path)
    assert (timed.equal, timed.stretch) == ("time", 3.0)
    timed.save(tmp_path)
    assert plain.merge_saved(tmp_path) == timed
    for other in (replace(plain, equal="bytes"), replace(plain, equal="time", stretch=2.0)):
        with pytest.raises(ValueError, match=r"equal was 'time', now 'bytes'|stretch was 3\.0, now 2\.0"):
            other.merge_saved(tmp_path)
    saved = json.loads((tmp_path / "bench.json").read_text())
    (tmp_path / "bench.json").write_text(
        json.dumps({k: v for k, v in saved.items() if k not in ("equal", "stretch")})
    )
    assert load_settings(tmp_path) == plain  # of an earlier version


def test_without_a_run_at_equal_steps(tmp_path: Path) -> None:
    settings = BenchSettings(task=TASK, methods=("pufferfish",), epochs=1, equal="time")
    workers, data = Workers.of_job("test"), find_task(TASK).load(None)
    with pytest.raises(ValueError, match="none has finished"):
        find_length("pufferfish", settings, tmp_path, data, workers, CPU)
    given = settings.run_settings(
        "pufferfish", settings.resolve()[1], tmp_path / "runs/pufferfish/seed-0", quiet=True
    )
    train(find_task(TASK), given)
    path = given.folder / "run.json"
    run = json.loads(path.read_text())
    del run["results"]["updates"]
    path.write_text(json.dumps(run))
    with pytest.raises(ValueError, match="an earlier version"):
        find_length("pufferfish", settings, tmp_path, data, workers, CPU)


def test_the_timed_model_is_the_trained_one(tmp_path: Path) -> None:
    """Layers that share an input compute together in both."""
    task = find_task("text:d=64,layers=2,heads=2,context=8")
    tiny.text(tmp_path)
    recipe = replace(task.recipe("short"), epochs=2, switch_at=1, batch=4)
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


def test_updates_of_sam_are_not_predicted(tmp_path: Path) -> None:
    settings = BenchSettings(task=TASK, methods=("dense@sam",), epochs=1, equal="time")
    recipe = replace(settings.resolve()[1], optimizer="sam")
    given = settings.run_settings("dense@sam", recipe, tmp_path / BenchRun("dense@sam", 0).name, quiet=True)
    train(find_task(TASK), given)
    workers, data, link = Workers.of_job("test"), find_task(TASK).load(None), LinkShape.parse("1gbit")
    with pytest.raises(ValueError, match="updates of SAM cannot be predicted"):
        find_length("dense@sam", settings, tmp_path, data, workers, CPU, link)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--equal", "bytes"], "one worker sends nothing; pass --hosts or --workers"),
        (["--equal", "time", "--stretch", "0.5"], "--stretch 0.5: must be at least 1"),
    ],
)
def test_bad_input(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TASK, "--out", str(tmp_path / "out"), *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
