"""Reports of one's own few runs, and figures that must not contradict each other."""

from __future__ import annotations

from pathlib import Path

from made_up import write_run
from page import Page

from pufferfish.lab.report import report
from pufferfish.measure import RunLog


def said(page: str) -> str:
    return " ".join(Page(page).said)


def test_a_loop_that_logs_only_its_loss_gets_a_curve(tmp_path: Path) -> None:
    with RunLog(tmp_path / "mine", name="mine", seed=0) as log:
        for step in range(1, 41):
            log.log(step=step, loss=2 / step)
    page = report([tmp_path])
    assert "loss, mean over seeds. mine ends at 0.05." in said(page)
    assert "the lowest to the highest seed" not in page
    (chart,) = Page(page).data["charts"]
    assert chart["lines"][0]["y"] == [float(f"{2 / step:.5g}") for step in range(1, 41)]
    (grid,) = Page(page).data["grids"]
    assert (grid["step"], grid["bytes"]) == (list(range(1, 41)), None)
    assert len(grid["time"]) == 40


def test_validation_comes_before_the_loss(tmp_path: Path) -> None:
    with RunLog(tmp_path / "mine", name="mine", seed=0) as log:
        log.log(step=1, loss=2.0, **{"valid/accuracy": 0.5})
        log.log(step=2, loss=1.0, **{"valid/accuracy": 0.75})
    first, second = Page(report([tmp_path])).data["charts"]
    assert (first["label"], first["lines"][0]["y"]) == ("validation accuracy, %", [50.0, 75.0])
    assert second["label"] == "loss"


def test_one_run_is_one(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567+"
    run = write_run(tmp_path / "a", "dense", 0, versions={"commit": commit})
    one = said(report([run]))
    assert one.count(commit) == 1  # in the table, whole
    assert "±" not in one
    assert "interval" not in one
    assert "Higher accuracy is better." in one
    write_run(tmp_path / "b", "dense", 1)
    two = said(report([tmp_path]))
    assert "± is half the width of a 95 % confidence interval (Student's t) over seeds." in two
