"""`Parts`: what a run is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...compression import compress
from ..rivals import SAM
from ..tasks.task import Task
from .optimizer import optimizer
from .process_group import placed
from .settings import Settings


@dataclass
class Parts:
    """What is trained, by whom, and where."""

    task: Task
    given: Settings
    data: Any
    model: Any  # as the loop calls it
    bare: nn.Module  # without wrappers
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    hook: Any  # that compresses gradients, where processes exchange them
    rank: int
    size: int  # workers, real or simulated
    device: torch.device


def build(task: Task, given: Settings, data: Any, rank: int, processes: int, device: torch.device) -> Parts:
    """The task's model, the recipe's optimizer and what joins them to the other processes."""
    torch.manual_seed(given.seed)
    bare = placed(task.build(), device)
    own = optimizer(bare, given.recipe, graph=given.graph)
    model: Any = DistributedDataParallel(bare) if processes > 1 else bare
    if isinstance(own, SAM):
        own.model = model  # whose first pass is not sent
    scaler = torch.amp.GradScaler(device.type, enabled=given.precision == "fp16")
    hook: Any = None
    if given.choice.compress is not None and processes > 1:
        scaled = scaler if scaler.is_enabled() else None
        hook = compress(model, given.choice.compress, optimizer=own, scaler=scaled)
    if given.compile:
        model = torch.compile(model)
    size = given.simulate or processes
    return Parts(task, given, data, model, bare, own, scaler, hook, rank, size, device)
