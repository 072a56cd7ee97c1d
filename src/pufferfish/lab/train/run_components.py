"""`RunComponents`: model, optimizer and everything else that a run trains with."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...compression import Settings, compress
from ..tasks import Task
from .build_optimizer import build_optimizer
from .narrow_method import build_model
from .run_settings import RunSettings
from .worker_device import move_to_device


class Replica(NamedTuple):
    """Model and optimizer of one worker."""

    module: nn.Module
    optimizer: Any


@dataclass
class RunComponents:
    """Everything that a run trains with.

    Args:
        model: wrapped by DDP if there are several processes.
        module: the model without wrappers.
        optimizer: of torch, or an `OptimizerList`.
        hook: compresses gradients between processes, or the `LocalSteps` of this worker, or None.
        worker: number of this worker, from 0.
        world_size: real or simulated workers.
        replicas: models and optimizers of the other simulated workers, if they have their own.
    """

    task: Task
    settings: RunSettings
    data: Any
    model: Any
    module: nn.Module
    optimizer: Any
    hook: Any
    worker: int
    world_size: int
    device: torch.device
    replicas: list[Replica] = field(default_factory=list)


def build_components(
    task: Task,
    settings: RunSettings,
    data: Any,
    worker: int,
    processes: int,
    device: torch.device,
    module: nn.Module | None = None,
) -> RunComponents:
    """Build the run's model, the recipe's optimizer, and how workers exchange what they learn: DDP or local steps.

    Args:
        module: a model to use instead of the run's.
    """
    torch.manual_seed(settings.seed)
    method, replicas = settings.method, []
    if method.local is not None and settings.simulate:
        replicas = [_replica(task, settings, device, None) for _ in range(settings.simulate - 1)]
        torch.manual_seed(settings.seed)
    module, optimizer = _replica(task, settings, device, module)
    world_size = settings.simulate or processes
    if method.compress is not None and method.compress.has_momentum and world_size > 1:
        _remove_momentum(optimizer)
    model: Any = DistributedDataParallel(module) if processes > 1 and method.local is None else module
    hook: Any = None
    if method.local is not None and not settings.simulate:
        hook = method.local.build()
    elif method.compress is not None and processes > 1:
        compression = Settings(scope=method.scope)
        hook = compress(model, method.compress, optimizer=optimizer, settings=compression)
    return RunComponents(
        task,
        settings,
        data,
        model,
        module,
        optimizer,
        hook,
        worker,
        world_size,
        device,
        replicas,
    )


def _remove_momentum(optimizer: Any) -> None:
    """Switch off the momentum of matrices and filters, for compression with momentum of its own; vectors are sent uncompressed."""
    for group in optimizer.param_groups:
        if group.get("momentum") and any(p.dim() > 1 for p in group["params"]):
            group |= {"momentum": 0.0, "nesterov": False}


def _replica(task: Task, settings: RunSettings, device: torch.device, module: nn.Module | None) -> Replica:
    module = move_to_device(module or build_model(task, settings.narrow), device)
    return Replica(module, build_optimizer(module, settings.recipe))
