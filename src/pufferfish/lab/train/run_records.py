"""What a run's folder says of it, and that a run which goes on there is the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ...measure import read
from ...measure.saved_run import JSON, fields_of
from ..tasks.task import Task
from .parts import Parts
from .settings import Settings
from .sinks import Log


def log_of(parts: Parts, link: Mapping[str, Any] | None, resume: int | None) -> Log:
    """The log of a run that begins, or goes on after `resume` updates."""
    given = parts.given
    if given.simulate and link is None:
        link = {"asked": given.network, "got_mbit": None, "latency_ms": None}
    if resume is None and begun(given):
        resume = 0  # it ended before its first checkpoint
    return Log(
        given.folder, given.sinks, resume, name=given.called, settings=_settings(parts.task, given), seed=given.seed,
        workers=parts.size, hosts=given.hosts, link=link,
    )  # fmt: skip


def begun(given: Settings) -> bool:
    """Whether a run was started in the folder, and did not finish."""
    path = given.folder / JSON
    return path.exists() and not fields_of(path)["finished"]


def refuse_other(task: Task, given: Settings) -> None:
    """A folder's run goes on as it began."""
    folder, here = given.folder, _settings(task, given)
    if not (folder / "checkpoints").is_dir() or not (folder / JSON).exists():
        return
    there = read(folder).settings
    for name in ("task", "method", "accumulate", "graph", "simulated", "recipe"):
        old, new = there.get(name), json.loads(json.dumps(here[name]))
        if old == new:
            continue
        if isinstance(old, dict):
            name = next(key for key in new if old.get(key) != new[key])
            old, new = old.get(name), new[name]
        raise ValueError(f"{folder}: it holds a run with {name} {old}, not {new}; choose another --out")


def _settings(task: Task, given: Settings) -> dict[str, Any]:
    return {
        "task": repr(task), "method": given.choice.name, "measure": task.measure, "higher": task.higher,
        "precision": given.precision, "accumulate": given.accumulate, "compile": given.compile,
        "graph": given.graph, "simulated": bool(given.simulate), "recipe": dataclasses.asdict(given.recipe),
        **given.about,
    }  # fmt: skip
