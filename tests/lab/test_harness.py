"""Studies: every job gives one row, a killed command continues, validation chooses the rate, and the table follows the rows."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pufferfish.lab.harness import Study, read_rows, table

SCRIPT = """
import os, signal, sys
from pathlib import Path

import torch
import pufferfish as pf
from pufferfish.lab.harness import Study, main

def run(job):
    \"\"\"A line fitted in 6 updates, each of them saved; KILL ends the whole command in the middle of one of the runs.\"\"\"
    torch.manual_seed(job.seed)
    model, x = torch.nn.Linear(4, 1), torch.randn(32, 4)
    target = x @ torch.arange(4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.rate, momentum=0.9 if job.arm == "momentum" else 0.0)
    checkpoint = pf.Checkpoint(job.folder, model, optimizer, keep=1)
    resumed = checkpoint.resume()
    for step in range(resumed.position["step"] if resumed else 0, 6):
        optimizer.zero_grad()
        (model(x)[:, 0] - target).square().mean().backward()
        optimizer.step()
        checkpoint.save(step=step + 1)
        kill = Path(os.environ.get("KILL", "-"))
        if step == 3 and (job.arm, job.seed) == ("momentum", 1) and kill.exists():
            kill.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
    loss = (model(x)[:, 0] - target).square().mean().item()
    return {"validation": loss, "test": loss + 1, "weights": model.weight.flatten().tolist()}

STUDIES = [Study(
    name="lines", run=run, arms={"plain": (0.01, 0.1, 3e9), "momentum": (0.1,)}, seeds=(0, 1), baseline="plain",
    score="loss", higher=False, settings={"updates": 6},
)]

if __name__ == "__main__":
    main(STUDIES, "lines")
"""

LINES = Study(
    name="lines", run=lambda job: {}, arms={"plain": (0.01, 0.1, 3e9), "momentum": (0.1,)}, seeds=(0, 1),
    baseline="plain", score="loss", higher=False, settings={"updates": 6},
)  # fmt: skip


def start(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "script.py", "--results", "results", "--work", "work", *words],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def rows(folder: Path) -> dict[tuple[str, float, int], dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "results/lines.jsonl").read_text().splitlines()]
    found = {(row["arm"], row["rate"], row["seed"]): row for row in lines}
    assert len(found) == len(lines)
    return {key: {k: row[k] for k in ("validation", "test", "weights")} for key, row in found.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    done = start(folder, "--processes", "2")
    assert done.returncode == 0, done.stderr
    return folder


def test_every_job_gives_one_row(finished: Path) -> None:
    """All rates with the first seed, the one that validation chose with the others; a diverged run has no score."""
    there = rows(finished)
    assert set(there) == {
        *(("plain", rate, 0) for rate in (0.01, 0.1, 3e9)), ("plain", 0.1, 1), ("momentum", 0.1, 0), ("momentum", 0.1, 1),
    }  # fmt: skip
    assert there["plain", 3e9, 0]["validation"] is None
    assert not any((finished / "work/lines").iterdir())
    again = start(finished)
    assert (again.returncode, again.stdout) == (0, "")


def test_a_killed_command_continues_and_changes_no_row(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    killed = start(tmp_path, "--processes", "2", KILL=str(tmp_path / "kill"))
    assert killed.returncode == -signal.SIGKILL
    unfinished = rows(tmp_path)
    assert set(unfinished) < set(rows(finished))
    with (tmp_path / "results/lines.jsonl").open("a") as file:
        file.write('{"arm": "plain", "ra')  # what a kill in the middle of a write leaves
    assert start(tmp_path, "--processes", "1").returncode == 0
    assert rows(tmp_path) == rows(finished)


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
