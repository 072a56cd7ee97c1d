"""Download the data of a task and verify it. Interrupted downloads are resumed."""

import argparse
import os
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", help="as in `pufferfish train`")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="data folder (default: $PUFFERFISH_DATA)")


def run(arguments: argparse.Namespace) -> None:
    from ..lab.data.dataset import fetch
    from ..lab.tasks import find_task

    task, folder = find_task(arguments.task), arguments.data or os.environ.get("PUFFERFISH_DATA")
    if task.dataset is None:
        raise ValueError(f"the task {task.name} has no data to download")
    if not folder:
        raise ValueError("no data folder given: pass --data FOLDER or set PUFFERFISH_DATA")
    print(fetch(task.dataset, Path(folder)))
