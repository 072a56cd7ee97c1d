"""A checkpoint folder belongs to one job: real processes that take it, are killed, and start again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from runs import names
from torch import nn

from processes import in_processes
from pufferfish.checkpoint import Checkpoint
from pufferfish.checkpoint.folder import OWNER

pytestmark = pytest.mark.timeout(120)  # the hang guard


def live(folder: Path, weight: float, orders: Connection) -> None:
    """A job that does as it is told: `resume`, `save` or `fork`; it answers with the result."""
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, weight)
    checkpoint = Checkpoint(folder, model)
    step = 0
    while True:
        match orders.recv():
            case "resume":
                try:
                    at = checkpoint.resume()
                    orders.send(at and at.position["step"])
                except ValueError as error:
                    orders.send(str(error))
            case "save":
                step += 1
                orders.send(checkpoint.save(step=step).name)
            case "fork":  # as a DataLoader does for its workers
                running, begin = os.pipe()
                child = os.fork()
                if child == 0:
                    os.write(begin, b"!")
                    signal.pause()
                os.read(running, 1)
                orders.send(child)


class OtherJob:
    """A job in another process."""

    def __init__(self, folder: Path, weight: float) -> None:
        context = multiprocessing.get_context("forkserver")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(folder, weight, theirs), daemon=True)
        self.process.start()

    def tell(self, order: str) -> Any:
        self.orders.send(order)
        assert self.orders.poll(60)
        return self.orders.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def other_job(folder: Path, weight: float = 0.0) -> Iterator[OtherJob]:
    job = OtherJob(folder, weight)
    try:
        yield job
    finally:
        job.kill()


def test_a_second_job_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with other_job(folder, weight=1.0) as first:
        assert first.tell("resume") is None  # the folder is empty, and taken
        model = nn.Linear(2, 2)
        with Checkpoint(folder, model) as second:
            for _ in range(2):
                refused = rf"new: in use by another job .*, process {first.process.pid} on .*, since .*; stop or close"
                with pytest.raises(ValueError, match=refused):
                    second.resume()
                with pytest.raises(ValueError, match=refused):
                    second.save(step=7)
                assert first.tell("save") is not None
            assert names(folder) == ["000001-step-1", "000002-step-2"]
            first.kill()
            at = second.resume()
            assert at is not None
            assert at.position == {"step": 2}
            assert model.weight.eq(1.0).all()
            assert second.save(step=3).name == "000003-step-3"


def test_forked_children_of_a_killed_job_do_not_hold_its_folder(tmp_path: Path) -> None:
    with other_job(tmp_path) as first:
        first.tell("save")
        child = first.tell("fork")
        first.kill()
        try:
            os.kill(child, 0)  # it lives
            with Checkpoint(tmp_path, nn.Linear(2, 2)) as second:
                assert second.resume() is not None
        finally:
            os.kill(child, signal.SIGKILL)


def refused_on_all_workers(rank: int, size: int, folder: Path) -> None:
    checkpoint = Checkpoint(folder, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"rank 0: .*in use by another job"):
        checkpoint.resume()
    with pytest.raises(ValueError, match=r"rank 0: .*in use by another job"):
        checkpoint.save(step=1)


def taken_by_two_workers(rank: int, size: int, folder: Path) -> None:
    with Checkpoint(folder, nn.Linear(2, 2)) as checkpoint:
        assert checkpoint.resume() is None
        checkpoint.save(step=1)


def test_a_job_of_two_workers(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        checkpoint.resume()
        in_processes(refused_on_all_workers, 2, tmp_path)
    in_processes(taken_by_two_workers, 2, tmp_path)  # closed: nobody has it
    assert names(tmp_path) == ["000001-step-1"]


def test_a_second_checkpoint_of_the_same_process_is_refused(tmp_path: Path) -> None:
    """Else a restart would resume whichever of them has saved last."""
    (tmp_path / "a").mkdir()
    first = Checkpoint(tmp_path, nn.Linear(2, 2))
    second = Checkpoint(tmp_path / "a" / "..", nn.Linear(2, 2))
    first.save(step=10)
    with pytest.raises(
        ValueError,
        match=f"or another Checkpoint of this one, process {os.getpid()} on .*; stop or close that one",
    ):
        second.save(step=4)
    first.save(step=11)
    first.close()
    second.save(step=4)
    del second  # without close
    with other_job(tmp_path) as other:
        assert other.tell("resume") == 4
    assert first.save(step=12).name == "000004-step-12"  # a closed one takes it again
    first.close()


def test_a_restart_in_the_same_process_takes_the_folder(tmp_path: Path) -> None:
    """The Checkpoint of the run before may live on, such as in a traceback."""
    before, model = Checkpoint(tmp_path, nn.Linear(2, 2)), nn.Linear(2, 2)
    before.save(step=1)
    again = Checkpoint(tmp_path, model)
    assert again.resume() is not None
    assert model.weight.equal(before.model.weight)
    for use in (before.save, before.resume):
        with pytest.raises(
            ValueError, match=f"another job or Checkpoint has taken it, process {os.getpid()} on"
        ):
            use()
    before.close()
    with other_job(tmp_path) as other:
        assert "in use by another job" in other.tell("resume")
    again.save(step=2)
    again.close()
    assert names(tmp_path) == ["000001-step-1", "000002-step-2"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_not_followed(exists: bool, tmp_path: Path) -> None:
    target, folder = tmp_path / "precious", tmp_path / "run"
    if exists:
        target.write_text("mine" * 1750)
    folder.mkdir()
    (folder / OWNER).symlink_to(target)
    with Checkpoint(folder, nn.Linear(2, 2)) as checkpoint:
        for use in (checkpoint.save, checkpoint.resume):
            with pytest.raises(ValueError, match=rf"run/{OWNER} is a link, .*; remove the link"):
                use()
        assert not exists or target.read_text() == "mine" * 1750
        assert target.exists() == exists
        (folder / OWNER).unlink()
        checkpoint.save(step=1)


def test_a_process_that_only_saves_ends_on_sigterm(tmp_path: Path) -> None:
    with other_job(tmp_path) as job:
        assert job.tell("save") == "000001-step-1"
        job.process.terminate()
        job.process.join(60)
        assert job.process.exitcode == -signal.SIGTERM


def test_a_job_that_lost_its_folder_stops(tmp_path: Path) -> None:
    """As on a file system whose locks other hosts do not see."""
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as first:
        assert first.resume() is None
        (tmp_path / OWNER).unlink()  # and the lock with it
        with other_job(tmp_path) as second:
            assert second.tell("save") == "000001-step-1"
            lost = rf"another job or Checkpoint has taken it, process {second.process.pid} on"
            with pytest.raises(ValueError, match=lost):
                first.save(step=9)
            with pytest.raises(ValueError, match=lost):
                first.resume()
            assert second.tell("save") == "000002-step-2"
        assert names(tmp_path) == ["000001-step-1", "000002-step-2"]


def test_a_removed_folder_is_made_again(tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "a", nn.Linear(2, 2)) as checkpoint:
        checkpoint.save(step=1)
        shutil.rmtree(tmp_path / "a")
        checkpoint.save(step=2)
        assert names(tmp_path / "a") == ["000001-step-2"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        with pytest.warns(
            UserWarning, match=r"\.owner: this file system has no locks \(No locks available\)"
        ):
            assert checkpoint.resume() is None
        checkpoint.save(step=1)
        assert checkpoint.resume() is not None
