"""The report's figures against slow references: what is compared, what is predicted, what is missing."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from pathlib import Path

import pytest
from made_up import METHODS, step_parts, write_run
from page import Page

from pufferfish.lab.report import report
from pufferfish.lab.report.statistics import student
from pufferfish.measure import RunLog


def student_by_integration(freedom: int) -> float:
    """The slow way: where the density from −t to t holds 95 %."""
    constant = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    step, area, t = 1e-4, 0.0, 0.0
    while area < 0.475:
        area += step * constant * (1 + (t + step / 2) ** 2 / freedom) ** (-(freedom + 1) / 2)
        t += step
    return t


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 11, 15, 40])
def test_quantiles_of_student(freedom: int) -> None:
    assert student(freedom) == pytest.approx(student_by_integration(freedom), abs=2e-4)


def test_headline_equals_a_slow_reference(bench: Path, html: str) -> None:
    rows = Page(html).table("Methods side by side")
    runs = {
        (n, s): json.loads((bench / f"{n}-{s}/run.json").read_text())["results"]
        for n in METHODS
        for s in range(3)
    }
    ends = {
        key: max(float(line.split(",")[0]) for line in (bench / f"{key[0]}-{key[1]}/metrics.csv").read_text().splitlines()[1:])
        for key in runs
    }  # fmt: skip
    assert list(rows)[:2] == ["bf16", "dense"]
    assert set(rows) == set(METHODS)
    t = student_by_integration(2)
    for name, row in rows.items():
        scores = [100 * runs[name, seed]["accuracy"] for seed in range(3)]
        half = t * statistics.stdev(scores) / math.sqrt(3)
        assert row["accuracy, %"][0] == f"{sum(scores) / 3:.2f} ± {half:.2f}"
        assert row["accuracy, %"][1] == pytest.approx(sum(scores) / 3)
        assert row["parameters"] == (f"{METHODS[name][2]:,}", METHODS[name][2])
        assert row["a step"][1] == pytest.approx(METHODS[name][0] * 1.02)  # the seed in the middle
        assert row["bytes a step"][1] == METHODS[name][1]
        assert row["whole run"][1] == pytest.approx(sorted(ends[name, seed] for seed in range(3))[1])
        if name == "bf16":
            assert row["difference to bf16"][0] == row["step against bf16"][0] == "–"
            continue
        gaps = [100 * (runs[name, seed]["accuracy"] - runs["bf16", seed]["accuracy"]) for seed in range(3)]
        mean, half = sum(gaps) / 3, t * statistics.stdev(gaps) / math.sqrt(3)
        verdict = "" if abs(mean) <= half else ", better" if mean > 0 else ", worse"
        assert row["difference to bf16"][0] == f"{mean:+.2f} ± {half:.2f}{verdict}".replace("-", "−")
        steps = [runs["bf16", s]["seconds_a_step"] / runs[name, s]["seconds_a_step"] for s in range(3)]
        assert row["step against bf16"][1] == pytest.approx(sorted(steps)[1])
        wholes = sorted(ends["bf16", s] / ends[name, s] for s in range(3))
        assert row["run against bf16"][1] == pytest.approx(wholes[1])
    assert rows["topk-0.01"]["step against bf16"][0].endswith(": slower")
    assert rows["topk-0.01"]["difference to bf16"][0].endswith(", worse")


def test_breakdown_is_that_of_the_low_rank_phase(html: str) -> None:
    rows = Page(html).table("Where a step's time goes")
    for name, (step, _, _, _, hidden) in METHODS.items():
        assert rows[name]["sum"][1] == pytest.approx(step)  # hidden is not in it
        assert rows[name]["exchange, hidden"][1] == pytest.approx(hidden)
        for part, value in step_parts(name, step, hidden).items():
            column = "exchange, hidden" if part == "hidden" else part
            assert rows[name][column][1] == pytest.approx(value)


def test_predictions_beyond_the_band_are_marked(html: str) -> None:
    rows = Page(html).table("Predicted and measured")
    assert rows["topk-0.01"]["error"] == ("+25 %, beyond 20 %", pytest.approx(1.27 / 1.02 - 1))
    assert rows["bf16"]["error"][0] == "−1 %"


def test_curves_are_means_over_seeds(bench: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(report([bench], "csv"))))
    cells: dict[str, dict[str, str]] = {}
    for r in rows:
        if r["table"] == "Progress":
            cells.setdefault(r["row"], {})[r["column"]] = r["value"]
    last = [c for c in cells.values() if (c["method"], c["over"]) == ("pufferfish", "bytes")][-1]
    found = []
    for seed in range(3):
        lines = (bench / f"pufferfish-{seed}/metrics.csv").read_text().splitlines()
        found.append([float(line.split(",")[4]) for line in lines if ",valid/accuracy," in line][-1])
        sent = [float(line.split(",")[4]) for line in lines if ",bytes," in line][-1]
    assert float(last["validation accuracy, %"]) == pytest.approx(100 * sum(found) / 3)
    assert float(last["lowest seed"]) == pytest.approx(100 * min(found))
    assert float(last["highest seed"]) == pytest.approx(100 * max(found))
    assert float(last["at"]) == sent


def test_missing_pieces_are_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "bf16", 1, finished=None, results={})
    for n, name in enumerate(("bare", "other")):
        folder = write_run(
            tmp_path / name, name, n, results={}, predicted={}, layers=[], versions={}, hardware={}
        )
        (folder / "metrics.csv").write_text("seconds,step,epoch,name,value\n")
    said = " ".join(Page(report([tmp_path])).said)
    assert "bf16: seed 1 did not finish; in the curves only." in said
    assert "No run has low-rank layers in its record." in said
    for form in ("csv", "latex", "markdown"):
        assert "bf16" in report([tmp_path], form)


def test_a_log_without_anything(tmp_path: Path) -> None:
    with RunLog(tmp_path / "mine"):
        pass
    said = " ".join(Page(report([tmp_path])).said)
    for text in (
        "Nothing to compare with",
        "No run says how long a step takes.",
        "no curves",
        "No run has low-rank",
    ):
        assert text in said


def test_a_run_that_was_never_a_number(tmp_path: Path) -> None:
    with RunLog(tmp_path / "a", name="dense", seed=0) as log:
        log.log(step=1, **{"valid/accuracy": math.nan})
        log.log(step=2, **{"valid/accuracy": 50.0})
        log.result(accuracy=math.nan)
    said = " ".join(Page(report([tmp_path])).said)
    assert "dense: seed 0 ended with a accuracy" not in said
    assert "dense: seed 0 ended with no number for accuracy." in said


def test_what_cannot_be_compared_stands_apart(tmp_path: Path) -> None:
    for n, link in enumerate(("100mbit", "1gbit")):
        for name in ("dense", "pufferfish"):
            write_run(tmp_path / f"{name}-{link}", name, 0, link={"asked": link, "got_mbit": 95.0 + n})
    page = report([tmp_path])
    assert page.count("<caption>Methods side by side</caption>") == 2
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        f"cifar10, 4 workers on 4 hosts, {link}, A processor with a name" for link in ("100mbit", "1gbit")
    ]
    assert "## Methods side by side (cifar10, 4 workers on 4 hosts, 1gbit" in report([tmp_path], "markdown")


def test_runs_of_other_lengths_are_not_compared_as_wholes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 0, epochs=30)
    page = Page(report([tmp_path]))
    assert page.table("Methods side by side")["pufferfish"]["run against bf16"][0] == "–"
    assert "pufferfish: another number of steps than bf16; whole runs are not compared." in page.said


def test_seeds_are_paired_or_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 1)
    page = Page(report([tmp_path]))
    row = page.table("Methods side by side")["pufferfish"]
    assert row["difference to bf16"][0] == row["step against bf16"][0] == "–"
    assert "pufferfish: no finished seed in common with bf16, so nothing is paired." in page.said


def test_predicted_times_say_so(tmp_path: Path) -> None:
    for name in ("bf16", "pufferfish"):
        write_run(tmp_path / name, name, 0, results={"accuracy": 0.9})
    page = Page(report([tmp_path]))
    row = page.table("Methods side by side")["pufferfish"]
    assert row["a step"][0] == "560 ms predicted"
    assert row["step against bf16"][0] == "2.12× predicted"
    assert {"a step, predicted", "2.12× as fast", "by the cost model, not measured"} <= set(page.said)


def test_a_prediction_never_beats_a_measurement(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 0)
    write_run(tmp_path / "c", "dreamt", 0, finished=None, predicted={"seconds_a_step": 0.001})
    said = Page(report([tmp_path])).said
    assert {"a step", "2.12× as fast", "590 ms instead of 1.25 s"} <= set(said)


def test_when_nothing_is_faster(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "topk-0.01", 0)
    said = Page(report([tmp_path])).said
    assert said.count("nothing faster") == 2
    assert "the next is topk-0.01, 0.54×: slower" in said


def test_settings_that_differ_within_a_method_are_said(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(
            tmp_path / f"{seed}", "dense", seed, settings={"task": "cifar10", "data": {"crop": seed > 0}}
        )
    assert "dense: its runs differ in data.crop, not in the seed alone." in report([tmp_path])


def test_against_and_target(tmp_path: Path) -> None:
    for name in ("dense", "bf16", "pufferfish"):
        write_run(tmp_path / name, name, 0)
    rows = Page(report([tmp_path], against="dense", target=90)).table("Methods side by side")
    assert rows["pufferfish"]["step against dense"][1] == pytest.approx(1.5 / 0.59)
    lines = [line.split(",") for line in (tmp_path / "dense/metrics.csv").read_text().splitlines()]
    first = next(float(line[0]) for line in lines if line[3] == "valid/accuracy" and float(line[4]) >= 0.9)
    assert rows["dense"]["time to 90"][1] == first
    with pytest.raises(ValueError, match=r"'fp8' is none of these runs' names: .*dense"):
        report([tmp_path], against="fp8")
