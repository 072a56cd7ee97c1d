"""Low rank before it is applied: a plan from a recorded call, and the shapes of the model after that plan."""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layers import meta_copy
from ..lowrank.factorize import reshape_
from ..planning.plan import Plan, plan

RANK_RATIO = 0.25  # rank as a fraction of the full rank, as in the Pufferfish paper


def example_from_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert the arguments of a call to an example for `plan`; tensors become meta tensors, so no batch is kept alive."""
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


def plan_for_example(model: nn.Module, example: Any, measure: bool) -> tuple[Plan, str]:
    """Plan `model` at `RANK_RATIO`; returns the plan and a note on how its compute time is known."""
    warm_up = "a third of the run is warm-up"
    try:
        low_rank = plan(model, RANK_RATIO, example=example, measure=measure and example is not None)
        note = f"{'layers timed' if measure else 'time assumed proportional to MACs'}; {warm_up}"
    except Exception:  # a model that reads values may fail in any way on meta tensors
        low_rank = plan(model, RANK_RATIO)
        note = f"MACs unknown, compute time assumed unchanged; {warm_up}"
    try:
        low_rank_shapes(model, low_rank)
    except ValueError as error:
        low_rank = low_rank.replace(e.keep_dense(str(error)) for e in low_rank)
    return low_rank, note


def low_rank_shapes(model: nn.Module, plan: Plan) -> nn.Module:
    """Return a copy of the model after `plan`, with shapes but without values."""
    copy = meta_copy(model)
    if plan.ranks:
        reshape_(copy, plan)
    return copy
