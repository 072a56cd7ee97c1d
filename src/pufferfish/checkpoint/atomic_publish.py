"""Make a checkpoint visible atomically: write it into a hidden folder, then rename that folder.

A reader sees a checkpoint folder completely or not at all, whenever the writer is killed.
"""

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lowrank.files import sync
from .checkpoint_folder import list_checkpoints, running_number
from .manifest import write_manifest

_HIDDEN = ".writing."


def create_hidden_folder(folder: Path) -> Path:
    """Create a hidden folder in `folder` to write a checkpoint into. This process owns `folder` (`FolderOwner`).

    Hidden folders that are there are of dead writers. They are removed first, to free their disk space.
    """
    for path in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(path, ignore_errors=True)
    hidden = folder / f"{_HIDDEN}{secrets.token_hex(8)}"
    hidden.mkdir()  # not mkdtemp: its folders do not follow the umask
    return hidden


def publish_by_rename(
    hidden: Path, files: Mapping[str, Any], world_size: int, step: int | None, keep: int | None
) -> Path:
    """Write the manifest, make the checkpoint visible by renaming `hidden`, and remove old checkpoints.

    Args:
        hidden: a folder from `create_hidden_folder` with all `files` in it.
        files: manifest entry (`file_record`) of every file, by file name.
        step: number of updates, becomes part of the folder name.
        keep: number of checkpoints to keep, including this one; None keeps all.

    Returns:
        The folder of the checkpoint.
    """
    write_manifest(hidden, files, world_size)
    older = list_checkpoints(hidden.parent)
    number = 1 + running_number(older[-1]) if older else 1
    published = hidden.with_name(f"{number:06d}" if step is None else f"{number:06d}-step-{step}")
    hidden.rename(published)  # atomic: from here on the checkpoint exists
    sync(published.parent)
    for path in older[: max(len(older) + 1 - keep, 0)] if keep else []:
        renamed = path.with_name(f"{_HIDDEN}{path.name}")
        path.rename(renamed)  # first, so that nobody reads a half-removed checkpoint
        shutil.rmtree(renamed, ignore_errors=True)
    return published
