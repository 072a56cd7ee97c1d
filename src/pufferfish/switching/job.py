"""A model as it runs in a job: what is around it, who else runs it, and what all ranks must know of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..distributed import shared_svd as spread
from ..distributed.rewrap import find_ddp, rewrap_
from ..distributed.workers import Workers
from ..layers.names import named_modules, unwrap
from ..planning.plan import Plan
from . import fsdp2 as fsdp
from .fsdp2 import outline, parameters


class Job:
    """A model as it runs: what is inside, what is around it and who else runs it."""

    def __init__(self, model: nn.Module, build: Callable[[], nn.Module] | None = None) -> None:
        self.model = model
        self.inner, self.ddp = unwrap(model), find_ddp(model)
        self.build = build
        first = next(iter(parameters(model).values()))
        self.sharded = isinstance(first, DTensor)
        group = self.ddp.process_group if self.ddp else dist.group.WORLD if self.sharded else None
        # Offloaded shards lie elsewhere than their job talks.
        device = torch.device(first.device_mesh.device_type) if isinstance(first, DTensor) else first.device
        self.workers = Workers(group, device)

    @cached_property
    def dense(self) -> nn.Module:
        """The dense model that plans are made of: without values where it is sharded."""
        return self.inner if self.build is None else outline(self.model, self.build)

    def spectra(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        if self.build is None:
            return spread.spectra(self.inner, self.workers, names)
        return fsdp.spectra(self.model, self.dense, self.workers, names)

    def rewrapped(self, rewrap: dict[str, Any]) -> None:
        """After its layers were replaced: a new reducer, nothing compiled, and their memory given back."""
        if self.ddp is not None:
            rewrap_(self.ddp, rewrap)
        if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in self.model.modules()):
            torch.compiler.reset()  # compiled code is for the old layers and keeps them alive
        gc.collect()  # the old reducer and compiled code lie in cycles: give their memory back now, not some day


def changing(model: nn.Module, plan: Plan) -> dict[int, str]:
    """The parameters that will be replaced, by id."""
    layers = {name: m for name, _, m in named_modules(model)}
    found = {}
    for e in plan:
        if e.matrix is not None and (e.rank or e.rule):
            found[id(layers[e.layer].get_parameter(e.matrix.weight))] = f"{e.layer}.{e.matrix.weight}"
    return found


def slowest(plan: Plan, workers: Workers) -> Plan:
    """Measured times are the maximum over the ranks, and decide again which layers stay."""
    timed = [e for e in plan if e.ms is not None]
    times = workers.largest(torch.tensor([e.ms for e in timed], dtype=torch.float64).reshape(-1, 2))
    made = {e.name: e.timed((ms[0], ms[1])) for e, ms in zip(timed, times.tolist(), strict=True)}
    return plan.replace(made.get(e.name, e) for e in plan)
