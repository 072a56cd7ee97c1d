"""`bench_mode`: the mode in which all methods of a bench run."""

import gc
from dataclasses import replace
from typing import Any

from ..tasks import Recipe, Task
from ..train.run_components import build_components
from ..train.step_modes import step_modes
from ..train.timed_run import WARM_UP, TimedRun
from ..train.worker_device import worker_device
from .bench_settings import BenchSettings


def bench_mode(settings: BenchSettings, task: Task, recipe: Recipe, data: Any) -> str:
    """Return the settings' mode; for "auto" a CUDA graph if it can capture updates of the dense model, otherwise eager.

    Models are compiled only if that is asked for, as every run of a bench would have to compile again.

    >>> settings = BenchSettings(task="digits", methods=())
    >>> bench_mode(settings, *settings.resolve(), data=None)
    'eager'
    """
    if settings.mode != "auto":
        return settings.mode
    given = replace(settings.run_settings("dense", recipe), simulate=None)
    processes = 1 if settings.simulate else settings.workers
    if "graph" not in step_modes(task, given, processes).candidates:
        return "eager"
    run = TimedRun(build_components(task, given, data, 0, 1, worker_device(settings.device)))
    run.seconds(WARM_UP)
    mode = run.mode
    del run
    gc.collect()  # it refers to itself, and would keep its model in the device's memory
    return mode
