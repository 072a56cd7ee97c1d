"""`named`: ways to train by their names. `way`: one of them, for real, in this job. `turns`: several side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from ...compress import NoCompression
from ...compress.aggregator import Levels
from ...factorize import reshape_
from ...plan import Plan
from ..choice import Choice, choice
from ..contender import Contender
from .job import shared
from .subject import Subject

#: Rounds of short steps fill so many seconds, and are at most so many.
_SECONDS, _MOST = 5.0, 25
#: What ends the name of a way on two levels.
NODE = ", levels=node"


def named(name: str) -> tuple[Choice, Levels]:
    """The way that is meant. On two levels plain averages too go through a method, the one that loses nothing.

    >>> named("pufferfish, levels=node")
    (Choice(name='pufferfish', model='pufferfish', compress=NoCompression()), 'node')
    >>> named("dense")
    (Choice(name='dense', model='dense', compress=None), 'flat')
    """
    chosen = choice(name.removesuffix(NODE))
    if not name.endswith(NODE):
        return chosen, "flat"
    return replace(chosen, compress=chosen.compress or NoCompression()), "node"


def way(about: Subject, chosen: Choice, plan: Plan | None = None, levels: Levels = "flat") -> Contender:
    """A model of its own that trains in one way, on batch after batch; make it on all workers.

    Factors are random numbers of about the right size: what they are makes no difference to the time.
    """
    model = low_rank(about.build(), plan) if chosen.model != "dense" else about.build()
    return Contender(
        chosen, model, about.optimizer, lambda net: about.forward(net, about.batch()), levels=levels
    )


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


def turns(ways: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each, which take turns in every round, after two that do not count.

    There are more rounds where steps are short: what else runs on a machine disturbs them most.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in itertools.count():
        for name, one in ways.items():
            times[name].append(one.seconds())
        if turn == 1:
            (lap,) = shared([sum(laps[-1] for laps in times.values())])
            rounds = max(rounds, min(_MOST, int(_SECONDS / lap)))
            times = {name: [] for name in ways}
        if turn == 1 + rounds:
            return times
    raise AssertionError
