"""`named`: ways to train by their names. `way`: one of them, for real, in this job."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ...compression import NoCompression
from ...compression.aggregator import Levels
from ...lowrank.factorize import reshape_
from ...planning.plan import Plan
from ..train.choice import Choice, choice
from .contender import Contender
from .subject import Subject

LOW_RANK = "pufferfish"
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


def full_rank(name: str) -> str:
    """What a way is before its switch; one that has none is what it is.

    >>> [full_rank(name) for name in ("pufferfish", "pufferfish+int8", "int8", "pufferfish+bf16, levels=node")]
    ['dense', 'int8', 'int8', 'bf16, levels=node']
    """
    word = name.removesuffix(NODE)
    low_rank, _, method = word.partition("+")
    return name if low_rank != LOW_RANK else (method or "dense") + name[len(word) :]


def way(about: Subject, chosen: Choice, plan: Plan | None = None, levels: Levels = "flat") -> Contender:
    """A model of its own that trains in one way, on batch after batch; make it on all workers.

    Factors are random numbers of about the right size: what they are makes no difference to the time.
    """
    model = low_rank(about.build(), plan) if chosen.model != "dense" else about.build()
    return Contender(
        chosen,
        model,
        about.optimizer,
        lambda net: about.forward(net, about.batch()),
        clip=about.clip,
        levels=levels,
    )


def low_rank(model: nn.Module, plan: Plan | None) -> nn.Module:
    """The model as the plan wants it, with random factors, in place.

    >>> import pufferfish as pf
    >>> from pufferfish.lowrank.factorize import ranks_of
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
