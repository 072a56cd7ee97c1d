"""Studies: every job gives one row, a killed command continues, validation chooses the rate, and the table follows the rows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from lines import LINES
from torch.multiprocessing import ProcessExitedException

from processes import forked
from pufferfish.lab.harness import main, read_rows, table


def command(rank: int, folder: Path, processes: int) -> None:
    os.chdir(folder)
    os.environ["KILL"] = "kill"
    sys.argv = ["lines.py", "--results", "results", "--work", "work", "--processes", str(processes)]
    with open("output", "w") as output, contextlib.redirect_stdout(output):
        main([LINES])


def start(folder: Path, processes: int) -> str:
    """Run the command of a script with the study in a process of its own, and return its output."""
    forked(command, 1, (folder, processes), name="lines")
    return (folder / "output").read_text()


def rows(folder: Path) -> dict[tuple[str, float, int], dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "results/lines.jsonl").read_text().splitlines()]
    found = {(row["arm"], row["rate"], row["seed"]): row for row in lines}
    assert len(found) == len(lines)
    return {key: {k: row[k] for k in ("validation", "test", "weight")} for key, row in found.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    start(folder, 1)
    return folder


def test_every_job_gives_one_row(finished: Path) -> None:
    """All rates with the first seed, the one that validation chose with the others; a diverged run has no score."""
    there = rows(finished)
    assert set(there) == {
        *(("plain", rate, 0) for rate in (0.01, 0.1, 1e60)), ("plain", 0.1, 1), ("momentum", 0.1, 0), ("momentum", 0.1, 1),
    }  # fmt: skip
    assert there["plain", 1e60, 0]["validation"] is None
    assert not any((finished / "work/lines").iterdir())
    assert start(finished, 2) == ""  # nothing is left to do


def test_a_killed_command_continues_and_changes_no_row(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        start(tmp_path, 2)
    unfinished = rows(tmp_path)
    assert set(unfinished) < set(rows(finished))
    assert any((tmp_path / "work/lines").glob("*/state.json"))
    with (tmp_path / "results/lines.jsonl").open("a") as file:
        file.write('{"arm": "plain", "ra')  # what a kill in the middle of a write leaves
    start(tmp_path, 1)
    assert rows(tmp_path) == rows(finished)
    found = read_rows(LINES, tmp_path / "results")
    killed = [row for row in found if (row["arm"], row["rate"], row["seed"]) not in unfinished]
    resumed = [(row["arm"], row["seed"]) for row in killed if row["resumed"]]
    assert ("momentum", 1) in resumed
    assert "≥" in table(LINES, found)
    first = read_rows(LINES, finished / "results")
    assert not any(row["resumed"] for row in first)
    assert "≥" not in table(LINES, first)


def test_the_table_has_means_and_paired_differences(finished: Path) -> None:
    there = rows(finished)
    shown = table(LINES, read_rows(LINES, finished / "results"))
    plain, momentum = (
        [float(str(there[arm, 0.1, seed]["test"])) for seed in (0, 1)] for arm in ("plain", "momentum")
    )
    gaps = [b - a for a, b in zip(plain, momentum, strict=True)]
    assert f"{sum(plain) / 2:.2f}" in shown
    assert f"{sum(gaps) / 2:+.2f} ± {12.7062 * abs(gaps[0] - gaps[1]) / 2:.2f}" in shown
    assert "not finished" not in shown


def test_rows_of_other_settings_are_refused(finished: Path) -> None:
    other = dataclasses.replace(LINES, settings={"updates": 7})
    with pytest.raises(SystemExit, match="use another --results"):
        read_rows(other, finished / "results")
