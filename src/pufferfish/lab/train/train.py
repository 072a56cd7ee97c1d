"""`train`: train a task from its first update to its score on the test data."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ...distributed.workers import Workers
from ...lowrank.files import save
from ..rivals.pruning_by_name import is_pruning_method
from ..tasks import Task
from .find_width import find_width
from .process_group import process_group
from .run_folder import check_same_run
from .run_settings import RunSettings
from .training_run import TrainingRun
from .worker_device import worker_device


def train(
    task: Task, settings: RunSettings, *, link: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Train to the end and return the results on the test data; None if the run was stopped after a checkpoint.

    Call it in every process that torchrun has started, in all processes of an existing group, or in a single process.

    Args:
        link: between the hosts, for run.json: {"asked", "got_mbit", "latency_ms"}.

    >>> import dataclasses, tempfile
    >>> from pathlib import Path
    >>> from pufferfish.lab.tasks import find_task
    >>> from pufferfish.lab.train.training_method import training_method
    >>> task = find_task("digits:mlp,width=4")
    >>> recipe = dataclasses.replace(task.recipe("short"), epochs=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(task, RunSettings(training_method("dense"), recipe, Path(folder), quiet=True))["parameters"]
    1482
    """
    device = worker_device(settings.device)
    with process_group(settings.device, settings.timeout) as world_size:
        workers = Workers.of_job("train", side_group=True)
        workers.run_on_first(lambda: check_same_run(task, settings))  # before anything takes time
        data = workers.run_on_all(lambda: _load_data(task, settings, world_size))
        if settings.method.narrow is not None:
            width = workers.run_on_all(lambda: find_width(task, settings))
            settings = replace(settings, narrow=width)
        if settings.compile:
            torch.compiler.reset()  # torch compiles a limited number of models of one class
        run = TrainingRun(task, settings, data, workers, device, link)
        with run.checkpoint:
            results = run.train()
        if results is not None and settings.save_model and not is_pruning_method(settings.method.model):
            workers.run_on_first(lambda: save(run.module, settings.folder / "model"))
        if world_size > 1:
            dist.barrier()  # a worker that leaves early would break the others' connections
        return results


def _load_data(task: Task, settings: RunSettings, world_size: int) -> Any:
    """Load the data; raises all errors that may concern a single worker."""
    settings.check(task, world_size)
    data = task.load(settings.data)
    task.steps(data, settings.recipe.batch)
    return data
