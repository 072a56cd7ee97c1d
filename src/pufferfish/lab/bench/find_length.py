"""`find_length`: how many updates of a method fit into the time, or the bytes, of the dense run."""

import gc
import math
from pathlib import Path
from typing import Any

import torch

from ...distributed.workers import Workers
from ...measure import Run, read_run
from ..network import LinkShape
from ..train.equal_length import EqualLength
from ..train.predict_step import predict_step
from ..train.run_components import RunComponents, build_components
from ..train.timed_run import TimedRun, relative_times
from .bench_method import bench_method
from .bench_settings import REFERENCES, BenchSettings
from .models_to_time import finished_run, known_width, to_final_model


def find_length(
    method: str,
    settings: BenchSettings,
    root: Path,
    data: Any,
    workers: Workers,
    device: torch.device,
    target_link: LinkShape | None = None,
) -> EqualLength:
    """Find the updates of a method at equal time or bytes, after its run at equal steps. Call it on all workers.

    Args:
        target_link: link for which steps are predicted, because it cannot be emulated here.
    """
    folder = workers.run_on_first(lambda: str(finished_run(method, settings, root) or ""))
    if not folder:
        raise ValueError(
            f"{method}: its number of updates follows from a run at equal steps, and none has finished"
        )
    run = read_run(folder)
    if "updates" not in run.results:
        raise ValueError(f"{folder}: written by an earlier version, which did not count updates; delete it")
    seconds: dict[str, float] = {}
    link = ""
    if settings.equal == "time":
        if settings.simulate:
            target_link = LinkShape.parse(settings.run_settings(method, settings.resolve()[1]).network)
        link = str(target_link or "")
        seconds, relative = _relative_time(method, settings, run, data, workers, device, target_link)
        gc.collect()  # timed runs refer to themselves, and would keep their models in the device's memory
    else:
        relative = _relative_bytes(settings, run, data)
    task, recipe = settings.resolve()
    fits, note = 1 / max(relative, 1e-9), ""
    if fits > settings.stretch:
        limit = f"--stretch limits them to {settings.stretch:g}×"
        note = f"{method}: {fits:.3g}× the updates of dense fit; {limit}."
    steps = math.floor(min(fits, settings.stretch) * task.steps(data, recipe.batch) + 1e-9)
    return EqualLength(
        equal=settings.equal, steps_per_epoch=max(steps, 1), relative=relative, seconds=seconds, link=link, note=note
    )  # fmt: skip


def _relative_time(
    method: str,
    settings: BenchSettings,
    run: Run,
    data: Any,
    workers: Workers,
    device: torch.device,
    target_link: LinkShape | None,
) -> tuple[dict[str, float], float]:
    """Seconds of updates, and the time of the method's run relative to the dense run.

    The updates before and after the last change of the model are timed, or predicted, beside those of the dense model.
    """
    task, default = settings.resolve()
    if target_link is not None and bench_method(method).recipe(default).optimizer == "sam":
        raise ValueError(f"{method}: updates of SAM cannot be predicted; remove this method, or --equal")

    def components(name: str, final: bool) -> RunComponents:
        recipe = bench_method(name).recipe(default)
        width = known_width(method, run.folder) if name == method else None
        given = settings.run_settings(name, recipe, narrow=width)
        built = build_components(task, given, data, workers.rank, workers.size, device)
        change = to_final_model(name, task, recipe, data, run.folder) if final else None
        if change is not None:
            change(built.model, built.optimizer)
        return built

    if "compile" in settings.mode:
        torch.compiler.reset()  # torch compiles a limited number of models of one class
    before, parsed = run.results["updates_before_change"], bench_method(method)
    if "low_rank_updates" in run.results:
        # A model that becomes dense again has dense updates after its last change, too.
        before = run.results["updates"] - run.results["low_rank_updates"]
    exchanges_less = parsed.method.compress is not None and settings.workers > 1
    is_dense = parsed.recipe(default) == default and parsed.method.local is None and not exchanges_less
    compared = [components(REFERENCES[0], False), components(method, True)]
    compared += [components(method, False)] if before and not is_dense else []
    computing: dict[str, float] = {}
    if target_link is None:
        dense, ratios = relative_times([TimedRun(each) for each in compared], workers)
    else:
        steps = [predict_step(each, target_link) for each in compared]
        predicted = workers.mean([step.step for step in steps])
        dense, ratios = predicted[0], [each / predicted[0] for each in predicted]
        parts = workers.mean([step.utilisation * step.step for step in steps[:2]])
        computing = dict(zip(("dense computing", "computing"), parts, strict=True))
    updates, first = run.results["updates"], 1.0 if is_dense else ratios[-1]
    mean = (before * first + (updates - before) * ratios[1]) / updates
    seconds = {"dense": dense, "after": dense * ratios[1], "mean": dense * mean, **computing}
    seconds |= {"before": dense * first} if before else {}
    return seconds, mean * updates / _dense_updates(settings, data)


def _relative_bytes(settings: BenchSettings, run: Run, data: Any) -> float:
    """Bytes of the run relative to the dense run, which is counted as in training: as a ring all-reduce."""
    ring = 2 * (settings.workers - 1) / settings.workers
    gradients = sum(p.nbytes for p in settings.resolve()[0].build().parameters() if p.requires_grad)
    return float(run.results["bytes"] / (ring * gradients * _dense_updates(settings, data)))


def _dense_updates(settings: BenchSettings, data: Any) -> int:
    task, recipe = settings.resolve()
    return recipe.epochs * task.steps(data, recipe.batch)
