"""`train`: a task from its first update to the score on test data, in one process or in each of a job's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ...checkpoint.control import Control
from ..tasks.task import Task
from .process_group import job, place
from .run import Run
from .run_records import refuse_other
from .settings import Settings


def train(task: Task, given: Settings, *, link: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Train to the end and score on the test data; None when it was asked to stop before, and has saved.

    Call it on every process that torchrun has started, in a process group that is there already, or alone.

    Args:
        link: between the hosts, for run.json: {"asked", "got_mbit", "latency_ms"}.

    >>> import dataclasses, tempfile
    >>> from pathlib import Path
    >>> from pufferfish.lab.train.choice import choice
    >>> from pufferfish.lab.tasks import find
    >>> task = find("digits:mlp,width=4")
    >>> recipe = dataclasses.replace(task.recipe("short"), epochs=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(task, Settings(choice("dense"), recipe, Path(folder), quiet=True))["parameters"]
    1482
    """
    device = place(given.device)
    with job(given.device, given.timeout) as size:
        control = Control()
        control.first(lambda: refuse_other(task, given))  # before anything takes time
        data = control.together(lambda: _loaded(task, given, size))
        run = Run(task, given, data, control, device, link)
        with run.checkpoint:
            found = run.go()
        if size > 1:
            dist.barrier()  # nobody leaves while another still talks
        return found


def _loaded(task: Task, given: Settings, size: int) -> Any:
    """All that can be wrong on one worker alone, before they talk."""
    given.check(task, size)
    data = task.load(given.data)
    task.steps(data, given.recipe.batch)
    return data
