"""`bench`: the whole of it, from what is asked to the table and the page."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...checkpoint.control import Control
from ..report import report, write
from ..rivals.rival_by_name import is_rival, make
from ..tasks.task import Recipe, Task
from ..train import optimizer
from ..train.process_group import enough_gpus, job
from ..train.screen import Screen
from .bench_settings import Asked
from .cells import Shard, cells, finished
from .entry import entry
from .run_on_hosts import Heard, run_on_hosts
from .summary import summarise
from .terminal_table import table
from .timed_models import lacking
from .tuned_rate import rates_of
from .worker import Work, settings

PAGE = "report.html"


def bench(
    asked: Asked,
    root: Path,
    *,
    data: Path | None = None,
    shard: Shard | None = None,
    target: float | None = None,
) -> list[str]:
    """Run what is left of a bench, print its table and write its page; the names of the cells that failed.

    Under torchrun this job's processes are the workers and its network is the link; otherwise they are started here,
    on emulated hosts if a network is asked for.

    Args:
        root: the bench's folder; what is finished in it stays.
        shard: this call's part of the work, where several share it.
        target: also show how long it took to this validation score.
    """
    shard = shard or Shard()
    asked = asked.with_earlier(root)
    task, recipe = asked.found()
    an_epoch = task.steps(task.load(data), recipe.batch)  # what is wrong with the data is said once, and here
    for method in asked.methods:
        refuse(method, asked, task, recipe, an_epoch)
    given: dict[str, Any] = {"data": data and str(data.resolve()), "shard": str(shard)}
    if "RANK" in os.environ:
        return _in_this_job(asked, root, data, shard, target)
    if not asked.simulate:
        enough_gpus(asked.device, asked.workers)
    asked.save(root)
    screen = Screen()
    failed: list[str] = []
    if left(asked, root, shard):
        if asked.workers > 1 and not asked.simulate:
            failed = run_on_hosts(asked, root, given, screen)
        else:
            heard = Heard(screen)
            if not Work(root, data=data, shard=shard, say=heard.tell).go():
                raise KeyboardInterrupt
            failed = heard.failed
    show(asked, root, target)
    return failed


def run(asked: Asked, root: Path, **settings: Any) -> int:
    """`bench` as a command: 0, 1 when cells failed, 130 when it was stopped."""
    try:
        failed = bench(asked, root, **settings)
    except KeyboardInterrupt:
        print("stopped; what is finished stays, and the same command goes on", file=sys.stderr)
        return 130
    if failed:
        print(f"not finished: {', '.join(failed)}; the same command tries again", file=sys.stderr)
    return 1 if failed else 0


def refuse(method: str, asked: Asked, task: Task, recipe: Recipe, an_epoch: int) -> None:
    """What a run of the method would refuse at its start, before anything runs."""
    one = entry(method)
    own = one.recipe(recipe)
    settings(asked, method, own, Path()).check(task, 1 if asked.simulate else asked.workers)
    if is_rival(one.choice.model):
        model = task.build()
        try:
            make(one.choice.model, model, optimizer(model, own), epochs=own.epochs, an_epoch=an_epoch)
        except ValueError as error:
            raise ValueError(f"--methods {method}: {error}") from None


def left(asked: Asked, root: Path, shard: Shard) -> bool:
    """Whether a shard has something to do."""
    _, recipe = asked.found()
    mine = (cell for cell in cells(asked, recipe) if shard.takes(cell, asked))
    untimed = [m for m in lacking(asked, root) if shard.times(m, asked)] if asked.timed else []
    return bool(untimed) or not all(finished(root / cell.name) for cell in mine)


def show(asked: Asked, root: Path, target: float | None = None) -> None:
    """Write what was found into the folder, print the table and say where the page is."""
    task, recipe = asked.found()
    rates = rates_of(asked, root, task, recipe) if asked.tune else {}
    summarise(root, asked.methods, rates)
    asked.save(root, rates={method: asdict(rate) | {"edge": rate.edge} for method, rate in rates.items()})
    if not any((root / "runs").glob("*/*/run.json")):
        return
    print(table(root, target))
    write(report([root], target=target, title=f"{asked.task}: methods compared"), root / PAGE)
    print(f"\n{root / PAGE}: open it in a browser")


def _in_this_job(
    asked: Asked, root: Path, data: Path | None, shard: Shard, target: float | None
) -> list[str]:
    with job(asked.device):
        control = Control()
        if asked.network is not None or control.size != asked.workers:
            raise ValueError(
                f"torchrun has started {control.size} workers: leave --network out and let --hosts times --per-host "
                f"be {control.size}"
            )
        control.first(lambda: asked.save(root))
        heard = Heard(Screen(silent=control.rank > 0))
        stopped = not Work(root, data=data, shard=shard, say=heard.tell).go()
        if not stopped:
            control.first(lambda: show(asked, root, target))
        return heard.failed
