"""`NarrowMethod`: training of a narrower dense model, as large as the low-rank one: `narrow`, `narrow-0.5`, `narrow-1.5M`."""

import inspect
import math
import re
from dataclasses import dataclass

from torch import nn

from ..tasks import Task


@dataclass(frozen=True)
class NarrowMethod:
    """Which low-rank model a narrower dense one has as many parameters as.

    Args:
        rank: fraction of the full rank of the low-rank model; None: the recipe's.
        parameters: instead of a rank, the number of parameters.
    """

    rank: float | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class NarrowWidth:
    """The width of a narrower model, a factor for the task's `build`, and a note about how it was found."""

    width: float
    note: str


def narrow_method(text: str) -> NarrowMethod | None:
    """Parse `narrow`, also with a rank or with a number of parameters. Returns None for other methods.

    >>> narrow_method("narrow"), narrow_method("narrow-0.5"), narrow_method("dense")
    (NarrowMethod(rank=None, parameters=None), NarrowMethod(rank=0.5, parameters=None), None)
    >>> narrow_method("narrow-1.5M").parameters, narrow_method("narrow-800k").parameters
    (1500000, 800000)
    """
    match = re.fullmatch(r"narrow(?:-([\d.]+)([kM])?)?", text)
    if match is None:
        return None
    digits, unit = match.groups()
    number = float(digits) if digits and re.fullmatch(r"\d*\.?\d+", digits) else 0.0
    if digits and not 0 < number < (math.inf if unit else 1):
        raise ValueError(
            f"{text!r}: after narrow- write the low-rank model's fraction of the full rank, as in narrow-0.25, or a number "
            "of parameters, as in narrow-1.5M"
        )
    if unit:
        return NarrowMethod(parameters=round(number * {"k": 1e3, "M": 1e6}[unit]))
    return NarrowMethod(number if digits else None)


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
