"""`pufferfish fetch`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .output_paths import Commands


def add(commands: Commands) -> None:
    """The command's arguments."""
    fetch = commands.add_parser("fetch", help="download a task's data, checked; goes on where it was cut")
    fetch.add_argument("task", metavar="TASK")
    fetch.add_argument("--data", type=Path, metavar="FOLDER", help="default: $PUFFERFISH_DATA")
    fetch.set_defaults(run=_fetch)


def _fetch(arguments: argparse.Namespace) -> None:
    from ..lab.data.fetch import fetch
    from ..lab.tasks.find import find

    task, folder = find(arguments.task), arguments.data or os.environ.get("PUFFERFISH_DATA")
    if task.dataset is None:
        raise ValueError(f"{task.name} has nothing to download")
    if not folder:
        raise ValueError("say where to: --data FOLDER, or PUFFERFISH_DATA")
    print(fetch(task.dataset, Path(folder)))
