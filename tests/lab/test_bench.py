"""A bench in real processes: its cells, what is skipped, resumed, refused and failed, and what it shows."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pufferfish.cli import main
from pufferfish.lab.bench import Asked, Shard, bench
from pufferfish.lab.bench.bench_settings import load, split
from pufferfish.lab.bench.cells import TUNE_SEED, Cell, cells, finished, slug
from pufferfish.lab.bench.learning_rates import Rate, best, grid
from pufferfish.lab.bench.summary import summarise
from pufferfish.lab.bench.terminal_table import table
from pufferfish.lab.report import report
from pufferfish.measure import read

TASK = "digits:mlp,width=16"
SMALL = Asked(task=TASK, methods=("pufferfish",), epochs=2)

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
    return ["bench", TASK, "--epochs", "2", "--rounds", "2", "--out", str(out), *more]


def finished_at(root: Path) -> dict[str, str | None]:
    return {str(p.parent.relative_to(root)): read(p.parent).finished for p in root.rglob("run.json")}


@pytest.mark.timeout(240)
def test_a_bench_of_real_workers(tmp_path: Path, mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    method = f"{mine}:Mine(rank=1)"
    more = ["--methods", f"pufferfish,auto+powersgd-2,{method}", "--workers", "2", "--target", "20"]
    assert main(words(out, *more)) == 0
    shown = capsys.readouterr()
    methods = ["dense", "bf16", "pufferfish", "auto+powersgd-2", method]
    lines = [line.split("  ")[0] for line in shown.out.splitlines()]
    assert lines[2:9] == ["method", *methods, "no exchange"]
    assert "predicted" in shown.out
    assert "to 20" in shown.out
    assert "[5/5]" in shown.err
    for name in methods:
        run = read(out / Cell(name, 0).name)
        assert run.finished
        assert run.name == name
        assert run.workers == 2
    rounds = [json.loads(p.read_text()) for p in sorted((out / "timing").iterdir())]
    assert [set(r["methods"]) for r in rounds] == [set(methods)] * 2
    assert all(r["predicted"][name]["seconds"] > 0 for r in rounds for name in methods)
    sent = {name: rounds[0]["methods"][name]["bytes"] for name in methods}
    assert sent["bf16"] == pytest.approx(sent["dense"] / 2, rel=0.01)
    parameters = {m: read(out / Cell(m, 0).name).results["parameters"] for m in ("dense", "pufferfish")}
    assert sent["pufferfish"] / sent["dense"] == parameters["pufferfish"] / parameters["dense"] < 1
    page = (out / "report.html").read_text()
    assert "no exchange" in page
    assert "rounds in which all methods took turns" in page
    before = finished_at(out)
    assert main(words(out, *more)) == 0  # the same again has nothing to do
    assert finished_at(out) == before
    assert len(list((out / "timing").iterdir())) == 2
    assert "[" not in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_more_seeds_and_methods_are_more_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "--methods", "dense")) == 0
    before = finished_at(tmp_path)
    assert before.keys() == {"runs/dense/seed-0"}
    capsys.readouterr()
    assert main(words(tmp_path, "--methods", "pufferfish", "--seeds", "2")) == 0
    after = finished_at(tmp_path)
    assert {name: after[name] for name in before} == before
    assert after.keys() == {f"runs/{m}/seed-{s}" for m in ("dense", "pufferfish") for s in (0, 1)}
    assert "±" in capsys.readouterr().out


@pytest.mark.timeout(200)
def test_workers_do_not_tear_each_others_lines() -> None:
    """They share a pipe, and print as well."""
    code = (
        "from pufferfish.lab.bench.work import speak\nfor i in range(20000): print('words'); speak({'i': i})"
    )
    into, out = os.pipe()
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=out, env=unbuffered) for _ in range(2)]
    os.close(out)
    with open(into) as pipe:
        text = pipe.read()
    assert [process.wait() for process in both] == [0, 0]
    told = [json.loads(line[1:])["i"] for line in text.splitlines() if line.startswith("@{")]
    assert sorted(told) == sorted([*range(20000)] * 2)


@pytest.mark.timeout(120)
def test_a_cell_that_fails_is_named_and_others_go_on(
    tmp_path: Path, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, broken = tmp_path / "out", f"{mine}:Broken"
    assert main(words(out, "--methods", broken, "--workers", "2", "--rounds", "1")) == 1
    shown = capsys.readouterr()
    assert f"{Cell(broken, 0).name} failed: " in shown.err
    assert "it breaks here" in shown.err
    assert f"not finished: {Cell(broken, 0).name}" in shown.err
    assert finished(out / "runs/dense/seed-0")
    assert finished(out / "runs/bf16/seed-0")
    assert not finished(out / Cell(broken, 0).name)
    assert json.loads((out / "timing/round-0.json").read_text())["methods"].keys() == {"dense", "bf16"}
    assert "dense" in shown.out


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_stopped_and_started_again(tmp_path: Path) -> None:
    """Ctrl-C ends the workers with a checkpoint; the same command goes on and finishes."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pufferfish", *words(out, "--methods", "dense", "--workers", "2")]
    command[command.index("--epochs") + 1] = "12"
    stopped = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    while not list(out.glob("runs/dense/seed-0/checkpoints/*-step-*")):
        assert stopped.poll() is None
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=100)
    assert stopped.returncode == 130
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert not finished(out / "runs/bf16/seed-0")
    subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=100
    )
    assert finished(out / "runs/dense/seed-0")
    steps = [step for _, step, _ in read(out / "runs/dense/seed-0").metrics["valid/accuracy"]]
    assert steps == sorted(set(steps))
    assert len(steps) == 12


@pytest.mark.timeout(120)
def test_learning_rates_are_chosen_on_validation_data(tmp_path: Path) -> None:
    asked = dataclasses.replace(SMALL, tune=3)
    assert bench(asked, tmp_path) == []
    told = json.loads((tmp_path / "bench.json").read_text())["rates"]
    for method in asked.methods:
        tried = {lr: read(tmp_path / Cell(method, lr=lr).name) for lr in grid(0.1, 3)}
        scores = {lr: run.metrics["valid/accuracy"][-1][2] for lr, run in tried.items()}
        assert {run.seed for run in tried.values()} == {TUNE_SEED}
        chosen = read(tmp_path / Cell(method, 0).name).settings["recipe"]["lr"]
        assert scores[chosen] == max(scores.values())
        assert told[method]["lr"] == chosen
        edge = chosen in (min(scores), max(scores))
        assert bool(told[method]["edge"]) == edge
        assert (f"{method}: its best learning rate" in table(tmp_path)) == edge
        assert (f"{method}: its best learning rate" in (tmp_path / "report.html").read_text()) == edge
    assert "lr-" not in report([tmp_path], "csv")
    assert f",{TUNE_SEED}" not in report([tmp_path], "csv")  # trials are not among the seeds


@pytest.mark.timeout(120)
def test_shards_in_folders_of_their_own_merge(tmp_path: Path) -> None:
    for n in (1, 2):
        bench(dataclasses.replace(SMALL, seeds=2), tmp_path / str(n), shard=Shard(n, 2))
    runs = [name for n in (1, 2) for name in finished_at(tmp_path / str(n))]
    assert sorted(runs) == sorted(Cell(m, s).name for m in SMALL.methods for s in (0, 1))
    for n in (1, 2):
        rounds_like(tmp_path / str(n))
        summarise(tmp_path / str(n), SMALL.methods, {})
    together = report([tmp_path / "1", tmp_path / "2"], "markdown").splitlines()
    rows = {line.split(" | ")[0]: line for line in reversed(together)}
    assert list(rows["| pufferfish"].split(" | "))[-1] == "2 |"
    assert "2.50× (2.25–2.75)" in report([tmp_path], "markdown", against="dense")
    assert sum(line.startswith("| no exchange | –") for line in together) == 1


@pytest.mark.parametrize("tune", [0, 3])
@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_shards_share_all_cells_and_need_nobody(tune: int, of: int) -> None:
    asked = Asked(task="digits", methods=("pufferfish", "auto", "powersgd-4"), seeds=3, tune=tune)
    every = list(cells(asked, asked.found()[1]))
    shards = [Shard(n + 1, of) for n in range(of)]
    takers = {cell: [s for s in shards if s.takes(cell, asked)] for cell in every}
    assert all(len(found) == 1 for found in takers.values())
    if tune:
        for method in asked.methods:
            assert len({found[0] for cell, found in takers.items() if cell.method == method}) == 1
    assert len({cell.name for cell in every}) == len(every) == 4 * (3 + tune)


def test_names_of_folders_differ() -> None:
    names = ["file.py:Mine(2)", "file.py:Mine(3)", "file.py:Mine[2]", "topk-0.1", "a/../../b"]
    assert len({slug(name) for name in names}) == len(names)
    assert all("/" not in slug(name) and not slug(name).startswith(".") for name in names)


def test_methods_are_split_outside_of_brackets() -> None:
    assert split("a,Accordion(PowerSGD(4), PowerSGD(1), every=5),,c") == (
        "a", "Accordion(PowerSGD(4), PowerSGD(1), every=5)", "c",
    )  # fmt: skip


def test_the_best_rate() -> None:
    rates = grid(0.1, 5)
    falling = dict(zip(rates, (5.0, 4.0, 3.0, 2.0, 1.0), strict=True))
    assert best(falling, True, 0.1) == Rate(0.025, falling)
    assert best(falling, False, 0.1) == Rate(0.4, falling)
    assert [best(falling, higher, 0.1).edge for higher in (True, False)] == ["lowest", "highest"]  # type: ignore[union-attr]
    peak = dict(zip(rates, (None, 4.0, 5.0, 5.0, float("nan")), strict=True))
    chosen = best(peak, True, 0.1)
    assert chosen is not None
    assert (chosen.lr, chosen.edge) == (0.1, "")
    assert best(dict.fromkeys(rates), True, 0.1) is None


def rounds_like(root: Path, elsewhere: str | None = None) -> list[dict[str, Any]]:
    """Three rounds of made-up figures in place of those that were timed; the last lacks a method."""
    made = []
    shutil.rmtree(root / "timing", ignore_errors=True)
    for n, dense in enumerate((2.0, 3.0, 5.0)):
        seconds = {"dense": dense, "bf16": dense / 1.5} | ({"pufferfish": dense / (2 + n)} if n < 2 else {})
        made.append({
            "steps": {}, "link": None, "elsewhere": elsewhere,
            "predicted": {name: {"seconds": 1.1 * s, "exchange": 0.1} for name, s in seconds.items()},
            "methods": {
                name: {"seconds": s, "alone": s / 2, "bytes": 100, "messages": 2, "parts": {"forward": s, "hidden": 0}}
                for name, s in seconds.items()
            },
        })  # fmt: skip
        (root / "timing").mkdir(exist_ok=True)
        (root / f"timing/round-{n}.json").write_text(json.dumps(made[-1]))
    return made


def test_the_summary_of_rounds(tmp_path: Path) -> None:
    rounds_like(tmp_path)
    summarise(tmp_path, SMALL.methods, {"dense": Rate(0.4, {0.2: 1.0, 0.4: 2.0})})
    found = json.loads((tmp_path / "summary.json").read_text())["methods"]
    low = found["pufferfish"]["results"]
    assert low["seconds_a_step"] == statistics.median([2.0 / 2, 3.0 / 3])
    assert low["rounds"]["against"]["dense"][1] == 2.5
    assert low["rounds"]["against"]["bf16"][1] == pytest.approx(2.5 / 1.5)
    assert found["dense"]["results"]["rounds"]["seconds"] == [2.5, 3.0, 4.0]
    assert "highest of 2" in found["dense"]["results"]["notes"][0]
    assert found["no exchange"]["results"]["seconds_a_step"] == 1.5
    assert found["no exchange"]["results"]["rounds"]["against"]["dense"] == [2.0, 2.0, 2.0]
    assert found["pufferfish"]["predicted"]["seconds_a_step"] == pytest.approx(1.1)


@pytest.mark.timeout(60)
def test_steps_of_a_link_that_could_not_be_emulated_are_predicted(tmp_path: Path) -> None:
    bench(SMALL, tmp_path)
    rounds_like(tmp_path, elsewhere="20mbit")
    summarise(tmp_path, SMALL.methods, {})
    shown = table(tmp_path)
    assert "Steps are predicted for 20mbit" in " ".join(shown.split())
    row = next(line for line in shown.splitlines() if line.startswith("pufferfish"))
    assert "1.1 s predicted" in row
    assert "predicted for 20mbit" in report([tmp_path])


def test_a_folder_never_mixes_what_cannot_be_compared(tmp_path: Path) -> None:
    SMALL.save(tmp_path)
    more = dataclasses.replace(SMALL, methods=("auto",), seeds=3).with_earlier(tmp_path)
    assert more.methods == ("dense", "pufferfish", "auto")
    assert more.seeds == 3
    for change in ({"epochs": 3}, {"task": "digits"}, {"tune": 3}, {"hosts": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} was .*, now .*Choose another folder"):
            dataclasses.replace(SMALL, **change).with_earlier(tmp_path)  # type: ignore[arg-type]
    assert load(tmp_path) == SMALL


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--methods", "puffer"], "there is no puffer"),
        (["--methods", "nowhere.py:Mine"], "nowhere.py"),
        (["--seeds", "0"], "--seeds 0"),
        (["--tune", "5"], "write lr=5"),
        (["--tune", "lr=1"], "take 2 or more rates"),
        (["--shard", "3/2"], "write 1/2 to 2/2"),
        (["--hosts", "3"], "does not go to 3 workers"),
        (["--network", "1gbit"], "one host has no link"),
        (["--network", "10gbit", "--hosts", "2"], "predicted, not emulated"),
        (["--network", "fast", "--hosts", "2"], "write it as 100mbit"),
        (["--recipe", "long"], "it has short"),
        (["--batch", "100000"], "training images"),
        (["--workers", "2", "--hosts", "2"], "leave it out"),
        (["--out", "."], "it is not empty"),
    ],
)
def test_bad_input_is_one_line(
    more: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("not a bench's")
    assert main(["bench", TASK, *more]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
