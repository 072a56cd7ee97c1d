"""The folder of a run: opening its log, and checking that a resumed run has the same settings."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.checkpoint_folder import list_checkpoints
from ...measure import read_run
from ...measure.run_log import RUN_FILE, read_run_file
from ..tasks import Task
from .run_components import RunComponents
from .run_settings import RunSettings
from .training_log import TrainingLog


def open_log(components: RunComponents, link: Mapping[str, Any] | None, resume: int | None) -> TrainingLog:
    """Open the log of a new run, or of a run that resumes after `resume` updates."""
    settings = components.settings
    if settings.simulate and link is None:
        link = {"asked": settings.network, "got_mbit": None, "latency_ms": None}
    if resume is None and has_unfinished_run(settings):
        resume = 0  # it ended before its first checkpoint
    log = TrainingLog(
        settings.folder, settings.tensorboard, resume, name=settings.run_name, settings=_record(components.task, settings),
        seed=settings.seed, workers=components.world_size, hosts=settings.hosts, link=link,
    )  # fmt: skip
    if log.writes and components.task.source is not None:
        name, text = components.task.source
        (settings.folder / name).write_text(text, encoding="utf-8")
    return log


def has_unfinished_run(settings: RunSettings) -> bool:
    """Whether the folder holds a run that did not finish."""
    path = settings.folder / RUN_FILE
    return path.exists() and not read_run_file(path)["finished"]


def check_same_run(task: Task, settings: RunSettings) -> None:
    """Raise ValueError if the folder holds a run with other settings."""
    folder = settings.folder
    if not list_checkpoints(folder / "checkpoints") or not (folder / RUN_FILE).exists():
        return
    check_same_task(task, folder)
    run = read_run(folder)
    saved = run.settings | {"seed": run.seed}
    given = _record(task, settings) | {"seed": settings.seed}
    names = [
        "method", "seed", "precision", "accumulate", "plan", "mode", "simulated", "recipe",
    ]  # fmt: skip
    if settings.simulate:  # a real job may continue with another number of workers, on another network
        saved |= {"workers": run.workers, "network": run.link and run.link["asked"]}
        given |= {"workers": settings.simulate, "network": settings.network}
        names += ["workers", "network"]
    for name in names:
        old, new = saved.get(name), json.loads(json.dumps(given.get(name)))
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            name = next(key for key in new if old.get(key) != new[key])
            old, new = old.get(name), new[name]
        raise ValueError(f"{folder}: it holds a run with {name} {old}, not {new}; choose another --out")


def check_same_task(task: Task, folder: Path) -> None:
    """Raise ValueError if the folder holds a run of another task, or of a user's file that has changed since then."""
    old, new = read_run(folder).settings.get("task"), repr(task)
    if old == new:
        return
    if task.source is not None and (folder / task.source[0]).is_file():
        raise ValueError(
            f"{folder}: {task.source[0]} has changed since this run started, and {folder / task.source[0]} is its text "
            "of then; undo the change, or choose another --out for a new run"
        )
    raise ValueError(f"{folder}: it holds a run with task {old}, not {new}; choose another --out")


def _record(task: Task, settings: RunSettings) -> dict[str, Any]:
    """The settings in run.json."""
    plan = settings.method.low_rank.plan_identity if settings.method.low_rank else None
    return {
        "task": repr(task), "method": settings.method.name, "measure": task.metric, "higher": task.higher_is_better,
        "precision": settings.precision, "accumulate": settings.accumulate, "mode": "compile" if settings.compile else "eager",
        "simulated": bool(settings.simulate), "recipe": dataclasses.asdict(settings.recipe),
        **({"plan": plan} if plan else {}),
        **({"narrow": dataclasses.asdict(settings.narrow)} if settings.narrow else {}),
    }  # fmt: skip
