"""What the commands share."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def refuse_locked(out: Path) -> None:
    """A folder that cannot be made, or not be written to; before the work, not after it."""
    folder = out
    while not folder.exists():
        folder = folder.parent
    _try(out, folder)


def refuse_no_file(out: Path | None) -> None:
    """A file that cannot be made; before the work, not after it."""
    if out is None:
        return
    if out.is_dir() or not out.parent.is_dir():
        what = "it is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ValueError(f"--out {out}: {what}; name a file in a folder that is there")
    if not out.exists():
        _try(out, out.parent)


def _try(out: Path, folder: Path) -> None:
    try:
        tempfile.TemporaryDirectory(dir=folder).cleanup()  # rights alone do not tell, of /proc for instance
    except OSError:
        raise ValueError(
            f"--out {out}: {folder} is no folder that can be written to; choose another"
        ) from None
