"""`Way`: steps of one way to train, for real, in this job. `turns`: several of them side by side."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...compress import compress
from ...compress.aggregator import Levels
from ...factorize import reshape_
from ...plan import Plan
from ..choice import Choice
from .job import shared
from .subject import Subject

#: Rounds of short steps fill so many seconds, and are at most so many.
_SECONDS, _MOST = 5.0, 25


class Way:
    """A model of its own that trains in one way; `step` it on all workers together.

    Factors are random numbers of about the right size: what they are makes no difference to the time.
    """

    def __init__(
        self, about: Subject, chosen: Choice, plan: Plan | None = None, levels: Levels = "flat"
    ) -> None:
        self.about = about
        self.bare = low_rank(about.build(), plan) if chosen.model != "dense" else about.build()
        self.optimizer = about.optimizer(self.bare)
        self.model: nn.Module = self.bare
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.model = DistributedDataParallel(self.bare)
            if chosen.compress is not None:
                compress(self.model, chosen.compress, optimizer=self.optimizer, levels=levels)

    def step(self, exchange: bool = True) -> None:
        """One update; without the exchange it is that of one worker alone."""
        with contextlib.nullcontext() if exchange else self._unsynchronised():
            self.about.forward(self.model, self.about.batch()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def _unsynchronised(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()


def low_rank(model: nn.Module, plan: Plan | None) -> nn.Module:
    """The model as the plan wants it, with random factors, in place.

    >>> import pufferfish as pf
    >>> from pufferfish.factorize import ranks_of
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> ranks_of(low_rank(model, pf.plan(model)))
    {'0': {'': 16}}
    """
    if plan is not None and plan.ranks:
        reshape_(model, plan)
        for p in model.parameters():
            if torch.isnan(p.detach()).any():
                with torch.no_grad():
                    nn.init.normal_(p, std=0.02)
    return model


def turns(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each, which take turns in every round, after two that do not count.

    There are more rounds where steps are short: what else runs on a machine disturbs them most.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in itertools.count():
        for name, way in ways.items():
            times[name].append(timed(way))
        if turn == 1:
            (lap,) = shared([sum(laps[-1] for laps in times.values())])
            rounds = max(rounds, min(_MOST, int(_SECONDS / lap)))
            times = {name: [] for name in ways}
        if turn == 1 + rounds:
            return times
    raise AssertionError


def timed(way: Way, exchange: bool = True) -> float:
    """Seconds of a step, from all workers' begin to the end of the last."""
    device = torch.device(way.about.device)
    _together(device)
    begun = time.perf_counter()
    way.step(exchange)
    _together(device)
    return time.perf_counter() - begun


def _together(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
