"""The short form of benchmarks/faults.py: real workers under torchrun, killed and told to stop, lose nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmark import benchmark

faults = benchmark("faults")
JOB = faults.Job(steps=24, switch_at=9, every=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> faults.End:  # type: ignore[name-defined]
    """The job that nobody disturbs."""
    end = faults.launch(tmp_path_factory.mktemp("whole"), JOB, 2)
    assert (end.status, end.starts, end.steps, end.left) == (0, 1, JOB.steps, 2)
    return end


@pytest.mark.timeout(300)  # the hang guard; what runs is killed
def test_kills(whole: faults.End, tmp_path: Path) -> None:  # type: ignore[name-defined]
    """At a random step, between two broadcasts of the switch, and in a checkpoint before it gets its name."""
    assert faults.killed(tmp_path, JOB, 2, whole, kills=3, seed=0)


@pytest.mark.timeout(300)
def test_sigterm(whole: faults.End, tmp_path: Path) -> None:  # type: ignore[name-defined]
    """To one worker, then to the launcher: saved, left, and resumed as if nothing had been."""
    assert faults.stopped(tmp_path, JOB, 2, whole)


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
    assert any("random numbers (saved by 2 ranks, now 3)" in words for words in end.reset)
    assert math.isfinite(end.loss)
