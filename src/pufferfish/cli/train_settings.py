"""What the arguments of `pufferfish train` mean."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..lab.tasks.task import Recipe, Task
    from ..lab.train import Settings


def settings(arguments: argparse.Namespace, hosts: int = 1) -> tuple[Task, Settings]:
    """The task, and how to train it."""
    from dataclasses import replace

    import torch

    from ..lab.tasks.find import find
    from ..lab.train import Settings
    from ..lab.train.choice import choice

    task: Any = find(arguments.task)
    if arguments.held is not None:
        if not hasattr(task, "held"):
            raise ValueError(f"--held {arguments.held:g}: {task.name} comes with validation data of its own")
        if arguments.held < 0:
            raise ValueError(f"--held {arguments.held:g}: take 0 or more")
        task = replace(task, held=type(task.held)(arguments.held))
    word = arguments.method + (f"+{arguments.compress}" if arguments.compress else "")
    usual = task.recipe(arguments.recipe)
    recipe = _recipe(arguments, usual)
    name = word if recipe.optimizer == usual.optimizer else f"{word},{recipe.optimizer}"
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    more = {"network": arguments.network} if arguments.simulate and arguments.network else {}
    if arguments.simulate and not arguments.workers:
        raise ValueError("--simulate: say how many by --workers N")
    return task, Settings(
        choice(word),
        recipe,
        arguments.out or Path("runs") / re.sub(r"[^\w.,+=()-]+", "_", f"{task.name}-{name}-{arguments.seed}"),
        data=arguments.data,
        seed=arguments.seed,
        device=device,
        precision=arguments.precision or ("bf16" if device == "cuda" else "fp32"),
        accumulate=arguments.accumulate,
        compile=arguments.compile,
        graph=arguments.graph,
        save_every=arguments.save_every,
        simulate=arguments.workers if arguments.simulate else None,
        sinks=tuple(sink for sink in ("jsonl", "tensorboard") if getattr(arguments, sink)),
        hosts=hosts,
        timeout=arguments.timeout,
        name=name,
        **more,
    )


def _recipe(arguments: argparse.Namespace, recipe: Recipe) -> Recipe:
    """With the numbers that were given in place of its own."""
    from ..lab.train.optimizer import with_optimizer

    for name in ("epochs", "batch"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: take 1 or more")
    if arguments.lr is not None and not 0 < arguments.lr < float("inf"):
        raise ValueError(f"--lr {arguments.lr:g}: take a positive number")
    changed = recipe.changed(epochs=arguments.epochs, batch=arguments.batch)
    return with_optimizer(changed, arguments.optimizer or recipe.optimizer, arguments.lr)


def places(arguments: argparse.Namespace) -> tuple[str | None, int, int]:
    """The network, hosts and workers on each that are to be started."""
    workers, hosts, per_host = arguments.workers, arguments.hosts, arguments.per_host
    if arguments.simulate:
        if hosts or per_host:
            raise ValueError("--simulate: --hosts and --per-host are for real workers; say --workers N")
        return None, 1, 1
    for name, value in (("workers", workers), ("hosts", hosts), ("per-host", per_host)):
        if value is not None and not 1 <= value <= 64:
            raise ValueError(f"--{name} {value}: choose 1 to 64")
    if workers and (arguments.network or hosts or per_host):
        raise ValueError("--workers is for the loopback; on a network say --hosts N and --per-host M")
    if arguments.network and not hosts:
        raise ValueError(f"--network {arguments.network}: say between how many: --hosts N")
    return arguments.network, hosts or 1, workers or per_host or 1
