"""Low rank as it would be: a plan for a model, by what is known of its calls, and the model's shape after it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layers import hollow
from ..lowrank.factorize import reshape_
from ..planning.plan import Plan
from ..planning.planner import plan

RATIO = 0.25


def shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments without their values, as `plan` takes an example; nothing of the batch is kept.

    >>> import torch
    >>> shapes(nn.Linear(4, 2), (torch.ones(3, 4),), {})
    {'input': tensor(..., device='meta', size=(3, 4))}
    """
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args
    if bound.args and any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values()):
        return bound.args
    named = dict(bound.arguments)
    for p in bound.signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            named |= named.pop(p.name, {})
    return named


def planned(model: nn.Module, call: Any, measure: bool) -> tuple[Plan, str]:
    """A plan at the ratio of the paper, and what to know of it."""
    warm_up = "a third of the run is warm-up"
    try:
        made = plan(model, RATIO, example=call, measure=measure and call is not None)
        note = f"{'layers timed' if measure else 'if time follows MACs'}; {warm_up}"
    except Exception:  # on shapes alone a model that looks at values may fail in any way
        made, note = plan(model, RATIO), f"MACs unknown, computing taken as unchanged; {warm_up}"
    try:
        reshaped(model, made)
    except ValueError as error:
        made = made.replace(e.stays(str(error)) for e in made)
    return made, note


def reshaped(model: nn.Module, made: Plan) -> nn.Module:
    """The model as a plan makes it, without its numbers."""
    shadow = hollow(model)
    if made.ranks:
        reshape_(shadow, made)
    return shadow
