"""`train_settings`: the settings of a run from the arguments of `pufferfish train`."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import settings_from

if TYPE_CHECKING:
    from ..lab.tasks import Task
    from ..lab.train import RunSettings


def train_settings(arguments: argparse.Namespace, hosts: int = 1) -> tuple[Task, RunSettings]:
    """Return the task and the settings of a run whose workers are on `hosts` machines."""
    import torch

    from ..lab.method_name import training_method
    from ..lab.tasks import find_task
    from ..lab.tasks.text import with_tokenizer
    from ..lab.train import RunSettings

    task: Any = find_task(with_tokenizer(arguments.task, arguments.data))
    if arguments.held is not None:
        if not hasattr(task, "held"):
            raise ValueError(
                f"--held {arguments.held:g}: the task {task.name} has its own validation data; remove --held"
            )
        if isinstance(task.held, int) and not arguments.held.is_integer():
            raise ValueError(
                f"--held {arguments.held:g}: the task {task.name} takes a number of images, not a fraction"
            )
        task = replace(task, held=type(task.held)(arguments.held))
    method = arguments.method + (f"+{arguments.compress}" if arguments.compress else "")
    default = task.recipe(arguments.recipe, epochs=arguments.epochs, batch=arguments.batch)
    recipe = default.with_optimizer(arguments.optimizer or default.optimizer, arguments.lr)
    name = method if recipe.optimizer == default.optimizer else f"{method},{recipe.optimizer}"
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.simulate and not arguments.workers:
        raise ValueError("--simulate: give the number of simulated workers with --workers N")
    folder = re.sub(r"[^\w.,+=()-]+", "_", f"{task.name}-{name}-{arguments.seed}")
    return task, settings_from(
        RunSettings,
        arguments,
        method=training_method(method),
        recipe=recipe,
        folder=arguments.out or Path("runs") / folder,
        device=device,
        simulate=arguments.workers if arguments.simulate else None,
        network=(arguments.simulate and arguments.network) or None,
        hosts=hosts,
        name=name,
        save_model=True,
    )


def worker_layout(arguments: argparse.Namespace) -> tuple[str | None, int, int]:
    """Return the network, the number of hosts and the workers per host to launch."""
    workers, hosts, per_host = arguments.workers, arguments.hosts, arguments.per_host
    if arguments.simulate:
        if hosts or per_host:
            raise ValueError("--simulate cannot be combined with --hosts or --per-host; use --workers N")
        return None, 1, 1
    for name, value in (("workers", workers), ("hosts", hosts), ("per-host", per_host)):
        if value is not None and not 1 <= value <= 64:
            raise ValueError(f"--{name} {value}: must be 1 to 64")
    if workers and (arguments.network or hosts or per_host):
        raise ValueError(
            "--workers cannot be combined with --network, --hosts or --per-host; use --hosts N --per-host M"
        )
    if arguments.network and not hosts:
        raise ValueError(f"--network {arguments.network}: give the number of hosts with --hosts N")
    return arguments.network, hosts or 1, workers or per_host or 1
