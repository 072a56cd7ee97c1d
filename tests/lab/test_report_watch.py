"""A page that follows runs: rewritten when they change, and left in order at ctrl-C."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from page import Page

from pufferfish.cli import main
from pufferfish.lab.report import report
from pufferfish.lab.report.watch import REFRESH, watch
from pufferfish.measure import RunLog


def test_the_page_is_written_when_a_run_changes(tmp_path: Path) -> None:
    written: list[tuple[int, float | None]] = []
    said: list[str] = []
    runs = tmp_path / "runs"
    runs.mkdir()

    def write_page(refresh: float | None) -> None:
        page = Page(report([runs], refresh=refresh))
        (body,) = [attributes for tag, attributes, _ in page.elements if tag == "body"]
        assert body.get("data-refresh") == (None if refresh is None else f"{refresh:g}")
        written.append((len(page.data["grids"][0]["step"]), refresh))

    def steps() -> object:
        yield  # nothing there yet
        with RunLog(runs / "mine", name="mine") as log:
            log.log(step=1, loss=2.0)
            log.log(step=2, loss=1.5)
            yield
            yield  # unchanged
            log.log(step=3, loss=1.0)
            yield
        raise KeyboardInterrupt

    going_on = steps()
    watch([runs], write_page, said.append, wait=lambda: next(going_on))  # type: ignore[call-overload]
    assert written == [(2, REFRESH), (3, REFRESH), (3, None)]
    assert said == [f"waiting: {runs}: no runs found; the folder of a run contains run.json and metrics.csv"]


def test_ctrl_c_ends_it_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLog(tmp_path / "mine", name="mine") as log:
        log.log(step=1, loss=2.0)
    out = tmp_path / "page.html"
    monkeypatch.setattr("time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    assert main(["report", str(tmp_path / "mine"), "--watch", "--out", str(out), "--title", "Mine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: open it in a browser; it is updated until Ctrl-C",
        "",
        f"{out}: no longer updated",
    ]
    assert "<h1>Mine</h1>" in out.read_text()
    assert "data-refresh=" not in out.read_text()


def test_only_a_page_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--watch", "--csv"])
    assert "not allowed with argument" in capsys.readouterr().err
