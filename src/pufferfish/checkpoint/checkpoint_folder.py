"""Find checkpoints in a folder, and the job that saved them."""

import re
import warnings
from pathlib import Path

from .manifest import read_job, read_manifest

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


def job_of(folder: Path) -> str | None:
    """Return the identity of the job that saved the checkpoints in `folder`; None if there are none.

    Raises:
        ValueError: if they are of several jobs, one of which must not resume from the other's.
    """
    first: dict[str, Path] = {}
    for path in list_checkpoints(folder):
        job = read_job(path)
        if job is not None:
            first.setdefault(job, path)
    if len(first) > 1:
        (a, of_a), (b, of_b), *_ = first.items()
        raise ValueError(
            f"{folder}: checkpoints of different jobs, {of_a.name} of job {a} and {of_b.name} of job {b}; move those of one "
            "job to another folder"
        )
    return next(iter(first), None)


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
