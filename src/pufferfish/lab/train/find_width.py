"""`find_width`: the width at which a dense model is as large, or as fast, as the low-rank one."""

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...distributed.workers import Workers
from ...measure.saved_run import RUN_FILE, read_run_file
from ...planning.planner import plan
from ..tasks import Task
from .macs_per_row import few_rows
from .narrow_method import NarrowWidth, build_model
from .random_low_rank import random_low_rank_
from .run_components import build_components
from .run_settings import RunSettings
from .timed_run import WARM_UP, TimedRun, time_ratio
from .worker_device import move_to_device

#: A width whose step time differs by less than this share needs no further search.
TOLERANCE = 0.02
#: Widths that are tried: counting parameters is cheap; timing is not, since each model may have to be compiled.
COUNTED, TIMED = 12, 5
#: Size and time of a step grow with a power of the width between 1 and 2: for the first guess.
POWER = 1.5


def with_width(
    task: Task, settings: RunSettings, data: Any, workers: Workers, device: torch.device
) -> RunSettings:
    """The settings with the width of a narrow model: that of the run in the folder, or a new one. Call it on all workers."""
    if settings.method.narrow is None or settings.narrow is not None:
        return settings
    saved = workers.run_on_first(lambda: saved_width(settings.folder, settings.method.name))
    found = NarrowWidth(**saved) if saved else find_width(task, settings, data, workers, device)
    return replace(settings, narrow=found)


def saved_width(folder: Path, method: str) -> dict[str, Any] | None:
    """The fields of the `NarrowWidth` of the run of this method in `folder`; None without such a run.

    >>> saved_width(Path("/nowhere"), "narrow")
    """
    if not (folder / RUN_FILE).is_file():
        return None
    settings = read_run_file(folder / RUN_FILE)["settings"]
    return settings.get("narrow") if settings.get("method") == method else None


def find_width(
    task: Task, settings: RunSettings, data: Any, workers: Workers, device: torch.device
) -> NarrowWidth:
    """Search the width of the run's method. Call it on all workers; steps are timed on all of them."""
    method = settings.method.narrow
    assert method is not None
    rank = settings.recipe.rank if method.rank is None else method.rank
    if _parameters(task, 0.5) == _parameters(task, 1.0):
        raise ValueError(
            f"method narrow: {task.name} builds the same model for width=0.5 as for width=1.0; multiply the sizes of its "
            "hidden layers by width"
        )
    if method.time:
        found = _by_time(task, settings, rank, data, workers, device)
        gc.collect()
    else:
        found = NarrowWidth(**workers.run_on_first(lambda: asdict(_by_size(task, rank, method.parameters))))
    return replace(found, note=f"{settings.method.name}: {found.note}")


def closest_width(ratio: Callable[[float], float], tries: int, tolerance: float = 0.0) -> tuple[float, float]:
    """Return the width whose ratio is the closest to 1, and that ratio, by interpolation and bisection in turns.

    Args:
        ratio: of a width above 0 and at most 1; it rises with the width, but may have steps and noise.
        tolerance: a ratio that is so close to 1 ends the search.

    >>> closest_width(lambda width: 4 * width**2, tries=2)
    (0.5, 1.0)
    """
    high = best = before = (1.0, ratio(1.0))
    low, power = (0.0, 0.0), POWER
    if best[1] <= 1:
        return best
    for number in range(tries):
        width = before[0] * before[1] ** (-1 / power)
        if low[0]:
            margin = (high[0] - low[0]) / 10
            width = min(max(width, low[0] + margin), high[0] - margin)
            if number % 3 == 2:  # steps and noise mislead the interpolation
                width = (low[0] + high[0]) / 2
        tried = width, ratio(width)
        best = min(best, tried, key=lambda pair: abs(math.log(pair[1])))
        if abs(best[1] - 1) <= tolerance:
            break
        power = math.log(tried[1] / before[1]) / math.log(width / before[0])
        power = min(max(power, POWER / 3), POWER * 3)
        low, high = (tried, high) if tried[1] < 1 else (low, tried)
        before = tried
    return best


def _by_size(task: Task, rank: float, parameters: int | None) -> NarrowWidth:
    target = parameters or plan(_on_meta(task, None), rank, keep=task.keep).after.parameters
    width, ratio = closest_width(lambda width: _parameters(task, width) / target, COUNTED)
    wanted = f"{target:,}" if parameters else f"the low-rank model's {target:,} (rank {rank:g})"
    return NarrowWidth(width, f"{_size_text(task, width)}, {ratio:.3f} of {wanted}.")


def _by_time(
    task: Task, settings: RunSettings, rank: float, data: Any, workers: Workers, device: torch.device
) -> NarrowWidth:
    steps = settings.recipe.epochs * task.steps(data, settings.recipe.batch)

    def timed_run(module: nn.Module) -> TimedRun:
        gc.collect()  # runs refer to themselves, and keep their models until they are found
        components = build_components(task, settings, data, workers.rank, workers.size, device, module)
        if components.modes.compiles:
            torch.compiler.reset()  # torch compiles a limited number of models of one class
        return TimedRun(components, steps)

    dense = move_to_device(task.build(), device)
    batch = few_rows(task, settings.recipe, data, device)
    example = plan(dense, rank, example=lambda model: task.loss(model, batch, settings.recipe), measure=False)
    # Layers that share an input compute together, as after a switch in training.
    made = replace(plan(dense, rank, keep=task.keep), shared_inputs=example.shared_inputs)
    low_rank = timed_run(random_low_rank_(dense, made))
    low_rank.seconds(WARM_UP)
    settings = replace(settings, mode=low_rank.mode)  # of all models that are compared
    width, ratio = closest_width(
        lambda width: time_ratio(timed_run(task.build(width=width)), low_rank, workers),  # type: ignore[call-arg]
        TIMED,
        TOLERANCE,
    )
    note = f"{_size_text(task, width)}; a step takes {ratio:.2f}× as long as the low-rank model's (rank {rank:g})"
    return NarrowWidth(width, note + (", which is not faster than dense." if width == 1 else "."))


def _size_text(task: Task, width: float) -> str:
    return f"{width:.3g} of the width, {_parameters(task, width):,} parameters"


def _parameters(task: Task, width: float) -> int:
    return sum(p.numel() for p in _on_meta(task, NarrowWidth(width, "")).parameters())


def _on_meta(task: Task, narrow: NarrowWidth | None) -> nn.Module:
    """A model without values; a user's code may need them."""
    try:
        with torch.device("meta"):
            return build_model(task, narrow)
    except (RuntimeError, NotImplementedError, ValueError):
        return build_model(task, narrow)
