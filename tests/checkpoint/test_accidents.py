"""Kills, full disks and SIGTERM: at most the steps since the last checkpoint are lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Loader, names
from torch import nn

from pufferfish.checkpoint import Checkpoint
from pufferfish.checkpoint.folder import OWNER
from pufferfish.checkpoint.process import Sigterm


def killed_at(event: int, work: Callable[[], Any]) -> bool:
    """Run `work` in a fork of this process that is killed at its n-th file operation; return whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(name: str, _: Any) -> None:
            nonlocal count
            if name == "open" or name.startswith(("os.", "shutil.")):
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
@pytest.mark.filterwarnings("ignore:This process")  # fork with threads, from Python 3.12 on
def test_a_kill_at_any_file_operation_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    checkpoint = Checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()), keep=1)
    nn.init.constant_(model.weight, 1.0)
    checkpoint.save(step=1)
    newest, event = 1, 0
    seen = set()

    def write() -> None:
        nn.init.constant_(model.weight, newest + 1.0)
        checkpoint.save(step=newest + 1)

    while True:
        event += 1
        checkpoint.close()  # the fork is another job, which takes the folder
        was_killed = killed_at(event, write)
        at = checkpoint.resume()
        assert at is not None
        step = at.position["step"]
        assert step in (newest, newest + 1)
        assert model.weight.eq(step).all()
        seen.add(step - newest)
        newest = step
        if not was_killed:
            break
    assert event > 15
    assert seen == {0, 1}
    checkpoint.save(step=newest + 1)
    assert len(names(tmp_path)) == 1  # nothing left behind
    checkpoint.close()


@contextlib.contextmanager
def tiny_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "200k"):
        for rows in (50, 250):  # 40 kB fit twice; 200 kB do not fit beside them
            model = nn.Linear(200, rows)
            with Checkpoint(tmp_path / "disk" / "a", model) as checkpoint:
                if rows == 50:
                    checkpoint.save(step=1)
                    small = model
                else:
                    with pytest.raises(OSError, match=r"model.safetensors.*No space left on device"):
                        checkpoint.save(step=2)
        assert names(tmp_path / "disk" / "a") == ["000001-step-1"]
        with Checkpoint(tmp_path / "disk" / "a", small) as checkpoint:
            assert checkpoint.resume() is not None
            # Full to the last byte: not even the small files fit.
            ballast = tmp_path / "disk" / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            with pytest.raises(OSError, match=r"No space left on device.*model\.json'"):
                checkpoint.save(step=3)
            assert names(tmp_path / "disk" / "a") == ["000001-step-1"]
            checkpoint.close()
            (tmp_path / "disk" / "a" / OWNER).unlink()
            with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                file.write(bytes(4096))
            with pytest.raises(OSError, match=rf"No space left on device.*{OWNER}'"):
                checkpoint.save(step=3)
            ballast.unlink()
            checkpoint.save(step=3)  # and on, once there is room


def test_a_read_only_folder(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tiny_disk(disk, "200k"), Checkpoint(disk, nn.Linear(2, 2)) as checkpoint:
        checkpoint.save(step=1)
        checkpoint.close()  # no file stays open for writing
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            checkpoint.save(step=2)
        assert names(disk) == ["000001-step-1"]


def test_a_value_that_cannot_be_saved(tmp_path: Path) -> None:
    loader = Loader()
    with Checkpoint(tmp_path, nn.Linear(2, 2), data=loader) as checkpoint:
        checkpoint.save(step=1)
        loader.count = {1, 2}  # type: ignore[assignment]
        with pytest.raises(TypeError, match="parts/data/count is a set"):
            checkpoint.save(step=2)
        loader.count = 1
        for step in (3.0, -1):
            with pytest.raises(TypeError, match=f"step={step} must be an int of at least 0"):
                checkpoint.save(step=step)  # type: ignore[arg-type]
        assert names(tmp_path) == ["000001-step-1"]


# SIGTERM.


def test_sigterm_saves_and_stops(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with Checkpoint(tmp_path, nn.Linear(2, 2), every=100) as checkpoint:
            for step in range(1, 10):
                if step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                if checkpoint.step(step=step):
                    break
            assert step == 3
            assert names(tmp_path) == ["000001-step-3"]
            assert heard == [signal.SIGTERM]  # the previous handler is called too
        assert signal.getsignal(signal.SIGTERM) is mine
        with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
            assert not checkpoint.step(step=4)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # a handler installed later stays
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_first_ctrl_c_saves_and_stops_the_second_interrupts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Checkpoint(tmp_path, nn.Linear(2, 2), every=100) as checkpoint:
        assert not checkpoint.step(step=1)
        os.kill(os.getpid(), signal.SIGINT)
        assert "press it again" in capfd.readouterr().err
        assert checkpoint.step(step=2)
        assert names(tmp_path) == ["000001-step-2"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    checkpoint = Checkpoint(tmp_path, nn.Linear(2, 2))  # without a block, ctrl-C interrupts as usual
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    checkpoint.close()


def test_a_handler_of_the_user_stays(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Checkpoint(tmp_path, nn.Linear(2, 2)):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:This process")  # fork with threads, from Python 3.12 on
def test_a_forked_child_ends_on_sigterm_and_not_on_ctrl_c(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not checkpoint.step()


def test_sigterm_is_caught_from_the_first_step_on_without_a_block(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    checkpoint = Checkpoint(tmp_path, nn.Linear(2, 2))
    checkpoint.save()
    assert signal.getsignal(signal.SIGTERM) == before  # nobody asks for it yet
    for _ in range(2):  # a closed one catches it again
        assert not checkpoint.step(step=1)
        assert not checkpoint.step(step=2)
        checkpoint.close()
        assert signal.getsignal(signal.SIGTERM) == before
    assert not checkpoint.step(step=3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpoint.step(step=4)
    assert names(tmp_path) == ["000001", "000002-step-4"]
    del checkpoint  # as close
    assert signal.getsignal(signal.SIGTERM) == before


def test_only_the_main_thread_handles_sigterm() -> None:
    before, sigterm = signal.getsignal(signal.SIGTERM), Sigterm()
    thread = threading.Thread(target=sigterm.catch)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    sigterm.close()
    assert not sigterm.seen


def test_created_before_the_process_group(tmp_path: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with Checkpoint(tmp_path / "a", nn.Linear(2, 2)) as checkpoint:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            with pytest.raises(RuntimeError, match="created before init_process_group"):
                checkpoint.save()
        finally:
            torch.distributed.destroy_process_group()
