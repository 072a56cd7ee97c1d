"""The short form of benchmarks/faults.py: a job whose workers are killed or get SIGTERM resumes bit for bit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from benchmark import benchmark
from processes import as_torchrun, forked, free_port

faults = benchmark("faults")
JOB = faults.Job(steps=24, switch_at=9, every=4)


def _work(rank: int, size: int, port: int, folder: Path) -> None:
    as_torchrun(rank, size, port)
    benchmark("faults").work(folder)


def run_forked(folder: Path, job: faults.Job) -> faults.End:  # type: ignore[name-defined]
    """Run or resume the job on two workers without the cost of torchrun."""
    faults.prepare(folder, job)
    forked(_work, 2, (2, free_port(), folder), name="faults")
    return faults.ended(folder, 0, 0.0)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> faults.End:  # type: ignore[name-defined]
    end = run_forked(tmp_path_factory.mktemp("uninterrupted"), JOB)
    assert (end.starts, end.steps, end.left) == (1, JOB.steps, 2)
    return end


@pytest.mark.slow
@pytest.mark.timeout(300)  # the hang guard
def test_kills_and_sigterm(uninterrupted: faults.End, tmp_path: Path) -> None:  # type: ignore[name-defined]
    """Killed between two broadcasts of the switch and before a checkpoint is renamed; then SIGTERM to torchrun."""
    strikes = [
        faults.Strike("switch", 1, JOB.switch_at),
        faults.Strike("rename", 0, 11),
        faults.Strike("update", 1, 16, "SIGTERM", launcher=True),
    ]
    job = dataclasses.replace(JOB, strikes=strikes)
    stopped = faults.launch(tmp_path, job, 2)
    assert (stopped.struck, stopped.starts, stopped.left) == (3, 3, 2), (tmp_path / "output").read_text()
    assert stopped.digests == []
    resumed = run_forked(tmp_path, job)
    assert resumed.starts == 4
    assert resumed.digests == uninterrupted.digests != []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_of_four_workers(tmp_path: Path) -> None:
    job = faults.Job(steps=60, switch_at=21, every=5)
    whole = faults.launch(tmp_path / "whole", job, 4)
    assert faults.killed(tmp_path, job, 4, whole, kills=10, seed=1)


@pytest.mark.slow
def test_another_number_of_workers(tmp_path: Path) -> None:
    end = faults.changed(tmp_path, JOB)
    assert (end.status, end.steps, end.left) == (0, JOB.steps, 3)
    assert any("random numbers (saved by 2 workers, now 3)" in reason for reason in end.reset)
    assert math.isfinite(end.loss)
