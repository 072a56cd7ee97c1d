"""Which checkpoints are kept, and how damaged ones are handled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import names
from torch import nn

from pufferfish.checkpoint import Checkpoint
from pufferfish.checkpoint import folder as folder_file


def test_the_last_ones_are_kept_in_the_order_of_saving(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpoint(tmp_path, model, every=5, keep=2) as checkpoint:
        for epoch in range(2):
            for step in range(1, 13):  # counts from the start of the epoch
                assert not checkpoint.step(step=step, epoch=epoch)
        assert names(tmp_path) == ["000003-step-5", "000004-step-10"]
        checkpoint.save(epoch=2)
        assert names(tmp_path) == ["000004-step-10", "000005"]
        at = checkpoint.resume()
        assert at is not None
        assert at.position == {"epoch": 2}
        assert at.folder == tmp_path / "000005"
    with Checkpoint(tmp_path, model, every=2, keep=None) as checkpoint:
        for _ in range(7):
            checkpoint.step()
    assert names(tmp_path) == ["000004-step-10", "000005", "000006", "000007", "000008"]
    files = {file.suffix for name in names(tmp_path) for file in (tmp_path / name).iterdir()}
    assert files == {".json", ".safetensors"}


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpoint(tmp_path, nn.Linear(1, 1), keep=0)
    with pytest.raises(TypeError, match="data is a list without state_dict"):
        Checkpoint(tmp_path, nn.Linear(1, 1), data=[1])


def test_folders_of_dead_writers_are_removed(tmp_path: Path) -> None:
    for name in (".writing.0123456789abcdef", ".writing.host.2147483648.x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.json").write_text("{}")
    Checkpoint(tmp_path, nn.Linear(2, 2)).save()
    assert names(tmp_path) == ["000001"]


def test_a_link_with_the_name_of_a_dead_writer_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".writing.a").symlink_to(tmp_path / "mine")
    (folder / "000001").symlink_to(tmp_path / "mine")
    Checkpoint(folder, nn.Linear(2, 2), keep=1).save()
    assert (tmp_path / "mine" / "file").read_text() == "mine"
    assert os.listdir(tmp_path / "mine") == ["file"]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o700), (0o022, 0o755)])
def test_files_follow_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        saved = Checkpoint(tmp_path / "run", nn.Linear(2, 2)).save()
    finally:
        os.umask(before)
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o777 == (mode if path.is_dir() else mode & 0o666), path
    assert (saved / "manifest.json").exists()


# Damage.


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
def test_a_damaged_checkpoint_is_named(harm: Callable[[Path], Any], tmp_path: Path) -> None:
    """Whichever of its files it is. The model does not change, and the checkpoint before can be resumed."""
    model = nn.Linear(4, 4)
    with Checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()), keep=None) as checkpoint:
        checkpoint.save(step=1)
        old = model.weight.detach().clone()
        newest = checkpoint.save(step=2)
        files = sorted(newest.iterdir())
        assert len(files) == 9
        for file in files:
            intact = file.read_bytes()
            harm(file)
            nn.init.ones_(model.weight)
            message = rf"000002-step-2.*{file.name}.* (damaged|missing)|{file.name}: damaged"
            with pytest.raises(ValueError, match=message):
                checkpoint.resume()
            assert model.weight.eq(1).all()
            with pytest.warns(UserWarning, match="000002-step-2.* resuming from the one before"):
                at = checkpoint.resume(damaged="previous")
            assert at is not None
            assert at.position == {"step": 1}
            assert torch.equal(model.weight, old)
            file.write_bytes(intact)
        harm(newest / "model.json")
        checkpoint.save(step=2)  # and on: the next one is the newest
        at = checkpoint.resume()
        assert at is not None
        assert at.folder.name == "000003-step-2"


def test_one_flipped_bit_of_a_manifest_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Wherever it is: in every third byte."""
    with Checkpoint(tmp_path, nn.Linear(2, 2), keep=None) as checkpoint:
        checkpoint.save(step=1)
        file = checkpoint.save(step=2) / "manifest.json"
        intact = file.read_bytes()
        for place in range(0, len(intact) - 1, 3):  # but for the newline at its end
            data = bytearray(intact)
            data[place] ^= 1 << place % 8
            file.write_bytes(data)
            with pytest.warns(UserWarning, match="manifest.json: damaged, .*resuming from the one before"):
                at = checkpoint.resume(damaged="previous")
            assert at is not None
            assert at.position == {"step": 1}, place
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        checkpoint.save(step=3)
        at = checkpoint.resume()
        assert at is not None
        assert at.position == {"step": 3}


def sign(checkpoint: Path, **changes: Any) -> None:
    """Write a manifest whose own digest is right."""
    data = json.loads((checkpoint / "manifest.json").read_text())
    del data["sha256"]
    data |= changes
    (checkpoint / "manifest.json").write_text(json.dumps(data | {"sha256": folder_file._digest(data)}))


@pytest.mark.parametrize(
    "changes",
    [
        {"world": 10**9},
        {"world": "1"},
        {"files": ["model.json"]},
        {"files": {"model.json": {"bytes": 1}}},
        {"files": {"../../../etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}},
    ],
    ids=str,
)
def test_a_manifest_of_another_structure_or_of_files_elsewhere(changes: Any, tmp_path: Path) -> None:
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        sign(checkpoint.save(step=1), **changes)
        with pytest.raises(ValueError, match=r"000001-step-1/manifest\.json: damaged, or not written by"):
            checkpoint.resume()


def test_all_damaged(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        flip(checkpoint.save() / "model.safetensors")
        with (
            pytest.warns(UserWarning, match="resuming from"),
            pytest.raises(ValueError, match="all 1 checkpoints are damaged"),
        ):
            checkpoint.resume(damaged="previous")


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        monkeypatch.setattr(folder_file, "_VERSION", 2)
        checkpoint.save()
        monkeypatch.undo()
        with pytest.raises(ValueError, match="format is 2, but this version of pufferfish reads format 1"):
            checkpoint.resume()
