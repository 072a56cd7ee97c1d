"""The method `narrow`: the width at which a dense model has as many parameters as the low-rank one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...planning.plan import plan
from ..tasks import Task

if TYPE_CHECKING:
    from .settings import RunSettings

#: Widths that are tried.
TRIES = 12


@dataclass(frozen=True)
class NarrowWidth:
    """The width of a narrower model, a factor for the task's `build`, and a note about how it was found."""

    width: float
    note: str


def find_width(task: Task, settings: RunSettings) -> NarrowWidth:
    """Find the width of the run's method; the same on all workers."""
    method = settings.method.narrow
    assert method is not None
    if _parameters(task, 0.5) == _parameters(task, 1.0):
        raise ValueError(
            f"method narrow: {task.name} builds the same model for width=0.5 as for width=1.0; multiply the sizes of its "
            "hidden layers by width"
        )
    rank = settings.recipe.rank if method.rank is None else method.rank
    target = method.parameters or plan(_on_meta(task, None), rank, keep=task.keep).after.parameters
    width, ratio = closest_width(lambda width: _parameters(task, width) / target)
    wanted = f"{target:,}" if method.parameters else f"the low-rank model's {target:,} (rank {rank:g})"
    size = f"{width:.3g} of the width, {_parameters(task, width):,} parameters"
    return NarrowWidth(width, f"{settings.method.name}: {size}, {ratio:.3f} of {wanted}.")


def closest_width(ratio: Callable[[float], float], tries: int = TRIES) -> tuple[float, float]:
    """Return the width whose ratio is the closest to 1, and that ratio, by bisection.

    Args:
        ratio: of a width above 0 and at most 1; it rises with the width, but may have steps.

    >>> closest_width(lambda width: 4 * width**2)
    (0.5, 1.0)
    """
    low, high = 0.0, 1.0
    best = tried = (1.0, ratio(1.0))
    for _ in range(tries if tried[1] > 1 else 0):
        low, high = (tried[0], high) if tried[1] < 1 else (low, tried[0])
        tried = (low + high) / 2, ratio((low + high) / 2)
        best = min(best, tried, key=lambda pair: abs(math.log(pair[1])))
    return best


def _parameters(task: Task, width: float) -> int:
    return sum(p.numel() for p in _on_meta(task, NarrowWidth(width, "")).parameters())


def _on_meta(task: Task, narrow: NarrowWidth | None) -> nn.Module:
    """A model without values; a user's code may need them."""
    try:
        with torch.device("meta"):
            return build_model(task, narrow)
    except (RuntimeError, NotImplementedError, ValueError):
        return build_model(task, narrow)


def check_takes_width(task: Task) -> None:
    """Raise ValueError if the task's model cannot be built narrower.

    >>> from pufferfish.lab.tasks import find_task
    >>> check_takes_width(find_task("digits"))
    """
    parameters = inspect.signature(task.builder).parameters
    if "width" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"method narrow: the model of {task.name} takes no width; add the argument `width=1.0` to the function "
            "that builds it, and multiply the sizes of its hidden layers by it"
        )


def build_model(task: Task, narrow: NarrowWidth | None) -> nn.Module:
    """Build the task's model, narrower if a width is given.

    >>> from pufferfish.lab.tasks import find_task
    >>> build_model(find_task("digits:mlp"), NarrowWidth(0.5, "half"))[1]
    Linear(in_features=64, out_features=128, bias=True)
    """
    return task.build() if narrow is None else task.build(width=narrow.width)  # type: ignore[call-arg]
