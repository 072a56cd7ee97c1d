"""Find checkpoints in a folder."""

import re
import warnings
from pathlib import Path

from .manifest import read_manifest

_NAME = re.compile(r"(\d+)(-step-\d+)?")  # ordered by the running number, not by the step


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    if not folder.exists():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (running_number(path), path))


def running_number(checkpoint: Path) -> int:
    """Return the running number at the start of a checkpoint's folder name."""
    return int(checkpoint.name.split("-")[0])


def newest_checkpoint(folder: Path, damaged: str) -> tuple[str, str] | None:
    """Return the path of the newest intact checkpoint and the digest of its manifest; None if there is none.

    Args:
        damaged: "raise" for a ValueError if the newest checkpoint is damaged, "previous" to fall back with a
            warning to the one before it.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return str(path), read_manifest(path)["sha256"]
        except ValueError as error:
            if damaged == "raise":
                raise ValueError(f'{error}; pass damaged="previous" to resume from the one before') from None
            warnings.warn(f"{error}; resuming from the one before", stacklevel=2)
    if paths:
        raise ValueError(f"{folder}: all {len(paths)} checkpoints are damaged")
    return None
