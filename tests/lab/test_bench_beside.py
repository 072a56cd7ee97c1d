"""`bench --beside`, `--minutes` and `--lines`: pieces in their order, times measured alone, the file of finished runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from page import Page

from pufferfish.cli import main
from pufferfish.lab.bench import BenchLines, BenchSettings, bench, restore_parts
from pufferfish.lab.bench.bench_pieces import Piece, due_pieces, missing_pieces
from pufferfish.lab.bench.bench_runs import BenchRun
from pufferfish.lab.bench.bench_tables import bench_tables
from pufferfish.lab.bench.bench_worker import BenchWorker
from pufferfish.lab.bench.piece_times import MEASUREMENT, START, Measured, PieceTimes, wall_seconds
from pufferfish.lab.bench.run_beside import Pool
from pufferfish.lab.report import report
from pufferfish.lab.report.export import as_markdown
from pufferfish.lab.report.link_times import predicted_step
from pufferfish.lab.train import find_width, timed_run
from pufferfish.lab.train.console import Console
from pufferfish.measure import RunLog, read_run

TASK = "digits:mlp,width=16"
SETTINGS = BenchSettings(
    task=TASK, methods=("pufferfish", "narrow@time"), epochs=2, tune=2, tune_epochs=1, seeds=2, equal="time", mode="eager"
)  # fmt: skip


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timing: here only what follows from it is of interest."""
    for name, value in {"ROUNDS": 1, "MAX_STEPS": 2, "WARM_UP": 1}.items():
        monkeypatch.setattr(timed_run, name, value)
    monkeypatch.setattr(find_width, "TIMED", 1)


def do_all(settings: BenchSettings, root: Path, lines: BenchLines, beside: int = 2) -> list[Piece]:
    """All pieces, one after the other in this process."""
    settings.save(root)
    done = []
    while due := due_pieces(settings, root):
        worker = BenchWorker(root, only=[due[0].name], beside=beside, on_event=lambda event: None)
        assert worker.run()
        assert worker.failed == []
        lines.add(settings, root, due[0].name)
        done.append(due[0])
    return done


def tables(settings: BenchSettings, root: Path) -> str:
    return as_markdown(bench_tables(settings, root, ["narrow@time"]))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("few_steps")
def test_pieces_and_lines(tmp_path: Path) -> None:
    lines = BenchLines(tmp_path / "results" / "lines.jsonl", "part")
    done = do_all(SETTINGS, tmp_path / "one", lines)
    names = [piece.name for piece in done]
    for method in SETTINGS.methods:
        runs = [n for n, piece in enumerate(done) if piece.method == method and piece.kind == "runs"]
        tuning = [n for n, piece in enumerate(done) if piece.method == method and piece.kind == "tune"]
        assert max(tuning) < min(runs)
        assert (len(tuning), len(runs)) == (2, 2)
    for method in ("pufferfish", "narrow@time"):
        length = names.index(f"equal-time/{method}/length.json")
        equal = [names.index(BenchRun(method, seed, equal="time").name) for seed in (0, 1)]
        assert names.index(f"runs/{method}/seed-0") < length < min(equal)
    assert names[0] == "widths/narrow@time.json"
    assert [piece.name for piece in done if piece.alone] == [name for name in names if name.endswith(".json")]

    # A run that had the device not for itself has no times of its own; steps are those measured alone.
    run = read_run(tmp_path / "one" / "runs/pufferfish/seed-1")
    assert run.results["shared"]["beside"] == 2
    assert run.results["shared"]["seconds_a_step"] > 0
    assert "seconds_a_step" not in run.results
    assert run.settings["recipe"]["epochs"] == 2
    assert read_run(next((tmp_path / "one/tune/dense").iterdir())).settings["recipe"]["epochs"] == 1
    shown = tables(SETTINGS, tmp_path / "one")
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())["methods"]
    measured = json.loads((tmp_path / "one/equal-time/pufferfish/length.json").read_text())
    seconds = measured["length"]["seconds"]
    ratio = summary["pufferfish"]["results"]["seconds_a_step"] / summary["dense"]["results"]["seconds_a_step"]
    assert ratio == pytest.approx(seconds["after"] / seconds["dense"])
    assert "Several runs shared the device." in shown
    assert "Differences at equal time: accuracy, %" in shown
    assert "4 hosts, by the cost model" in shown
    assert set(wall_seconds(tmp_path / "one")) == set(done)

    # The file is enough for the same tables, and for more seeds.
    records = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [record["piece"] for record in records] == names
    assert all("accuracy" not in r["results"] for r in records if r["piece"].startswith("tune/"))
    assert lines.restore(SETTINGS, tmp_path / "two") != []
    assert due_pieces(SETTINGS, tmp_path / "two") == []
    assert tables(SETTINGS, tmp_path / "two") == shown

    # The report needs no settings: the file has the same figures as the folder.
    (restored,) = restore_parts(lines.path, tmp_path / "parts")
    ours, theirs = (Page(report([root])).tables for root in (restored, tmp_path / "one"))
    for title in ("Comparison of methods", "Quality and cost", "Equal time: accuracy, %"):
        assert ours[title] == theirs[title]
    assert "part, Digits(" in report([restored])
    more = replace(SETTINGS, seeds=3)
    lines.restore(more, tmp_path / "three")
    missing = [piece.name for piece in due_pieces(more, tmp_path / "three")]
    assert missing == [BenchRun(m, 2).name for m in more.methods] + [
        BenchRun(m, 2, equal="time").name for m in more.methods[1:]
    ]
    assert "| dense | 2 of 3 |" in tables(more, tmp_path / "three").replace(
        "| 0.1, at the edge | 2 of 2 ", ""
    ).replace("| 0.2, at the edge | 2 of 2 ", "")


@pytest.mark.usefixtures("few_steps")
def test_lines_that_do_not_fit_are_ignored(tmp_path: Path) -> None:
    plain = BenchSettings(task=TASK, methods=(), epochs=1, mode="eager")
    lines = BenchLines(tmp_path / "lines.jsonl", "part")
    do_all(plain, tmp_path / "one", lines, beside=1)
    assert "seconds_a_step" in read_run(tmp_path / "one" / "runs/dense/seed-0").results
    assert lines.restore(plain, tmp_path / "two") == ["runs/dense/seed-0"]
    assert lines.restore(replace(plain, epochs=2), tmp_path / "epochs") == []
    assert lines.restore(replace(plain, recipe="short,rank=0.5"), tmp_path / "recipe") == []
    assert lines.restore(replace(plain, recipe="short,lr=0.7"), tmp_path / "rate") == []
    assert BenchLines(lines.path, "other").restore(plain, tmp_path / "part") == []
    tuned = replace(plain, tune=2)  # not before the rate is known
    assert lines.restore(tuned, tmp_path / "tuned") == []
    names = [piece.name for piece in do_all(tuned, tmp_path / "tuned", lines)]
    chosen = read_run(tmp_path / "tuned" / names[-1]).settings["recipe"]["lr"]
    assert lines.restore(tuned, tmp_path / "three") == names
    assert read_run(tmp_path / "three" / names[-1]).settings["recipe"]["lr"] == chosen


def test_predicted_steps_of_simulated_workers(tmp_path: Path) -> None:
    """The computation behind a prediction is measured alone, not in a run that shares the device."""
    settings = BenchSettings(
        task=TASK, methods=("int8", "pufferfish"), epochs=2, per_host=2, simulate=True, network="1gbit", mode="eager"
    )  # fmt: skip
    lines = BenchLines(tmp_path / "lines.jsonl", "part")
    done = do_all(settings, tmp_path / "one", lines)
    measured = [piece.method for piece in done if piece.alone]
    assert measured == ["bf16", "int8", "pufferfish"]
    shown = tables(settings, tmp_path / "one")
    assert (
        "Step times are predicted from computation that was measured afterwards, without other runs." in shown
    )
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())["methods"]
    lengths = {m: json.loads((tmp_path / f"one/equal-time/{m}/length.json").read_text()) for m in measured}
    seconds = {m: record["length"]["seconds"] for m, record in lengths.items()}
    predicted = {m: summary[m]["predicted"] for m in settings.methods}
    dense = sorted(x["dense"] for x in seconds.values())[1]
    assert predicted["dense"]["seconds_a_step"] == pytest.approx(dense)
    for m, x in seconds.items():
        assert predicted[m]["seconds_a_step"] == pytest.approx(dense * x["after"] / x["dense"])
        assert predicted[m]["utilisation"] == pytest.approx(x["computing"] / x["after"])
    assert 0 < predicted["dense"]["utilisation"] <= 1
    lines.restore(settings, tmp_path / "two")
    assert tables(settings, tmp_path / "two") == shown
    alone = do_all(replace(settings, methods=()), tmp_path / "alone", lines, beside=1)
    assert not any(piece.alone for piece in alone)  # these runs have measured it
    assert "no exchange" in tables(replace(settings, methods=()), tmp_path / "alone")


@pytest.mark.usefixtures("few_steps")
def test_a_pruned_model_is_timed_from_its_checkpoints(tmp_path: Path) -> None:
    settings = BenchSettings(task="digits:width=4", methods=("early-bird-0.5",), epochs=2, mode="eager")
    lines = BenchLines(tmp_path / "lines.jsonl", "part")
    assert "early-bird-0.5/length.json" not in str(missing_pieces(settings, tmp_path / "none"))
    done = do_all(settings, tmp_path / "one", lines)
    assert [piece.name for piece in done if piece.alone] == ["equal-time/early-bird-0.5/length.json"]
    run = next(line for line in lines.path.read_text().splitlines() if '"measured"' in line)
    assert json.loads(run)["measured"]["length"]["seconds"]["after"] > 0
    without = tmp_path / "without.jsonl"
    without.write_text(lines.path.read_text().replace(run + "\n", ""))
    BenchLines(without, "part").restore(settings, tmp_path / "two")
    assert due_pieces(settings, tmp_path / "two") == []  # another machine has no checkpoints
    assert missing_pieces(settings, tmp_path / "two") == []


def test_an_incomplete_last_line(tmp_path: Path) -> None:
    settings = BenchSettings(task=TASK, methods=(), epochs=1, seeds=2, mode="eager")
    lines = BenchLines(tmp_path / "lines.jsonl", "part")
    do_all(settings, tmp_path / "one", lines)
    whole = lines.path.read_bytes()
    lines.path.write_bytes(whole[:-10])
    assert lines.restore(settings, tmp_path / "two") == ["runs/dense/seed-0"]
    lines.add(settings, tmp_path / "one", "runs/dense/seed-1")
    assert lines.path.read_bytes() == whole
    lines.path.write_bytes(b"{}\n" + whole)
    with pytest.raises(ValueError, match=r"lines\.jsonl:1: not a line of a bench; delete it"):
        lines.restore(settings, tmp_path / "three")


def test_what_fits_into_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is started that would end too late, by the time of similar ones; measurements have the device alone."""
    settings = replace(SETTINGS, methods=("narrow@time",), tune_epochs=None)
    settings.save(tmp_path)
    pool = Pool(settings, tmp_path, {}, Console(silent=True), beside=3, minutes=4, expected=20)
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setitem(MEASUREMENT, "widths", 60.0)
    now, pool._end = 0.0, 240.0

    def names(*running: Piece) -> list[list[str]]:
        return [[piece.name for piece in pieces] for pieces in pool._next(list(running))]

    width = Piece("widths/narrow@time.json", "narrow@time", alone=True)
    first, second = (Piece(f"tune/dense/lr-{lr}", "dense") for lr in ("0.1", "0.2"))
    assert names() == [[width.name]]  # at once, as nothing runs
    assert names(width) == []
    assert names(first) == []  # the measurement waits for the run, and the next run for the measurement
    now = 180.1
    assert names(first) == []  # with two runs on the device one takes 30 s and 2 × 20 s
    assert pool.left == [width, second]
    assert names() == [[first.name]]
    with RunLog(tmp_path / first.name, name="dense") as log:
        log.result(wall_seconds=25.0)
    assert pool.expected_seconds(second) == 25
    assert names(Piece("other", "dense")) == [[second.name]]  # 50 s with another run
    now = 191.0
    assert names(Piece("other", "dense")) == []
    assert names() == [[second.name]]


def test_the_time_of_a_piece() -> None:
    run, tuning = Piece("runs/dense/seed-0", "dense"), Piece("tune/dense/lr-0.1", "dense")
    settings = replace(SETTINGS, epochs=10, tune_epochs=2)
    declared = PieceTimes(settings, {}, expected=100)
    assert [declared.seconds(piece, 3) for piece in (run, tuning)] == [START + 300, START + 60]
    assert [declared.device_seconds(piece) for piece in (run, tuning)] == [100, 20]
    assert PieceTimes(settings, {}).seconds(run, 1) == 0
    known = {tuning: Measured(50, beside=2), Piece("tune/auto/lr-0.1", "auto"): Measured(80, beside=2)}
    times = PieceTimes(settings, known)
    assert [times.seconds(tuning, n) for n in (1, 2, 4)] == [pytest.approx(100 / 3), 50, 100]
    assert times.seconds(run, 2) == 250  # it has five times as many epochs
    assert times.seconds(Piece("tune/narrow/lr-0.1", "narrow"), 2) == 80  # the longest of others
    declared = replace(times, expected=100)
    assert declared.seconds(run, 2) == START + 200  # a long run has one start, too
    assert times.device_seconds(tuning) == 25
    finished = replace(times, measured=known | {run: Measured(70, beside=1)}, expected=100)
    assert finished.seconds(Piece("equal-time/dense/seed-0", "dense"), 1) == 70


def test_measurements_share_a_process(tmp_path: Path) -> None:
    settings = replace(SETTINGS, methods=("pufferfish", "narrow"), tune=0, seeds=1)
    settings.save(tmp_path)
    pool = Pool(settings, tmp_path, {}, Console(silent=True), beside=2)
    pool._end = None
    for method in settings.methods:
        with RunLog(tmp_path / BenchRun(method, 0).name, name=method, settings={"recipe": {}}) as log:
            log.result(wall_seconds=30.0)
    lengths = [f"equal-time/{method}/length.json" for method in ("pufferfish", "narrow")]
    assert [[piece.name for piece in pieces] for pieces in pool._next([])] == [lengths]
    pool._end = time.monotonic() + 1.5 * MEASUREMENT["length.json"]
    assert [[piece.name for piece in pieces] for pieces in pool._next([])] == [lengths[:1]]


def test_a_failed_tuning_run(tmp_path: Path) -> None:
    """The processes of other runs learn of it, and use the best of the other rates."""
    settings = replace(SETTINGS, methods=(), equal="steps", epochs=1, seeds=1)
    settings.save(tmp_path)
    tried, failed = BenchRun("dense", lr=0.1).name, BenchRun("dense", lr=0.2).name
    assert BenchWorker(tmp_path, only=[tried], on_event=lambda event: None).run()
    pool = Pool(settings, tmp_path, {"data": None}, Console(silent=True), failed=[failed])
    (run,) = due_pieces(settings, tmp_path, pool.failed)
    options = pool._options([run])
    assert options["skip"] == [failed]
    assert BenchWorker(tmp_path, on_event=lambda event: None, **options).run()
    assert read_run(tmp_path / run.name).settings["recipe"]["lr"] == 0.1
    assert read_run(tmp_path / run.name).results["wall_seconds"] > 0


TASK_FILE = """
from pufferfish.lab.tasks.digits import Digits

class Mine(Digits):
    def build(self, width: float = 1.0):
        if width < 1:
            raise RuntimeError("too narrow")
        return super().build()

task = Mine("mlp", width=16)
"""


@pytest.mark.timeout(180)
def test_processes_side_by_side(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(TASK_FILE)
    words = [
        "bench",
        f"{tmp_path / 'mine.py'}:task",
        "--methods",
        "narrow",
        "--epochs",
        "1",
        "--mode",
        "eager",
    ]
    words += ["--beside", "2", "--lines", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*words, "--minutes", "0"]) == 0
    assert not (tmp_path / "lines.jsonl").exists()
    capfd.readouterr()
    assert main(words) == 1
    shown = capfd.readouterr().err
    assert "runs/narrow/seed-0 failed:" in shown
    assert "RuntimeError: too narrow" in shown
    assert "not finished: runs/narrow/seed-0" in shown
    (line,) = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert json.loads(line)["piece"] == "runs/dense/seed-0"
    assert json.loads(line)["results"]["shared"]["beside"] == 2

    # A finished run that is not in the file is added, and nothing is run again.
    (tmp_path / "lines.jsonl").unlink()
    settings = BenchSettings(task=words[1], methods=(), epochs=1, mode="eager")
    before = (tmp_path / "out" / "runs/dense/seed-0/run.json").read_bytes()
    (tmp_path / "out" / "bench.json").unlink()
    settings.save(tmp_path / "out")
    assert bench(settings, tmp_path / "out", lines=BenchLines(tmp_path / "lines.jsonl", words[1])) == []
    assert (tmp_path / "lines.jsonl").read_text().splitlines() == [line]
    assert (tmp_path / "out" / "runs/dense/seed-0/run.json").read_bytes() == before


@pytest.mark.timeout(120)
def test_a_run_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    settings = BenchSettings(task=TASK, methods=(), epochs=10**6, mode="eager")
    settings.save(tmp_path)
    options = json.dumps({"only": "runs/dense/seed-0", "data": None, "shard": "1/1"})
    command = [sys.executable, "-m", "pufferfish.lab.bench.bench_worker", str(tmp_path), "--options", options]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=110)
    assert ended.returncode != 0
    assert b"Traceback" not in ended.stderr


def test_runs_of_several_processes_are_refused(tmp_path: Path) -> None:
    settings = BenchSettings(task=TASK, methods=(), hosts=2)
    with pytest.raises(ValueError, match="are for runs of one process; leave out torchrun, --hosts"):
        bench(settings, tmp_path, minutes=1)
    with pytest.raises(ValueError, match="--beside 0: must be at least 1"):
        bench(replace(settings, hosts=1), tmp_path, beside=0)


def test_predicted_steps_against_a_bound() -> None:
    """A ring all-reduce among 4 hosts passes 1.5 times the gradients through each link; backward can hide two thirds."""
    for link, mbit in (("100mbit", 100), ("1gbit", 1000)):
        transfer = 1.5 * 2 * 25e6 * 8 / (mbit * 1e6)
        step = predicted_step(0.06, 25e6, link)
        assert 0.02 + transfer < step < 0.06 + 1.15 * transfer
    assert predicted_step(0.06, 25e6, "1000gbit") == pytest.approx(0.06, rel=0.05)
