"""`bench`: runs all methods of a bench, times their steps, and shows the results."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...measure.run_log import RUN_FILE
from ...planning.text import Table
from ..method_name import training_method
from ..report import report, write
from ..report.comparison import Comparison, compare_runs, find_runs
from ..report.formatting import format_bytes
from ..report.tables import headline
from ..rivals.pruning import build_pruning_change
from ..tasks import Recipe, Task
from ..train import build_optimizer
from ..train.console import Console
from ..train.record import check_same_task
from ..train.workers import check_gpu_count, launch_workers
from .bench_settings import BenchSettings, bench_runs, choose_rate, is_finished, untried_runs
from .bench_worker import FAILED, TIMING, BenchWorker, failed_runs
from .timing import untimed_methods, write_summary

PAGE = "report.html"


def bench(settings: BenchSettings, root: Path, *, data: Path | None = None) -> list[str]:
    """Run what is missing in a bench, print its table, write its page, and return the names of the runs that failed.

    The workers are started here, on emulated hosts if the settings have a network.

    Args:
        root: folder of the bench; finished runs in it are kept.
        data: folder with the task's data.
    """
    if "RANK" in os.environ:
        raise ValueError("a bench starts its workers itself; run it without torchrun")
    settings = settings.merge_saved(root)
    task, recipe = settings.resolve()
    for path in root.glob(f"*/*/*/{RUN_FILE}"):
        check_same_task(task, path.parent)
    steps_per_epoch = task.steps(task.load(data), recipe.batch)  # raises errors of the data before any run
    for method in settings.methods:
        check_method(method, settings, task, recipe, steps_per_epoch)
    if not settings.simulate:
        check_gpu_count(settings.device, settings.workers)
    settings.save(root)
    failed: list[str] = []
    if has_work(settings, root):
        for name in failed_runs(root):  # are tried again
            (root / name / FAILED).unlink()
        if settings.workers > 1 and not settings.simulate:
            run_job(settings, root, data)
        elif not BenchWorker(root, data=data).run():
            raise KeyboardInterrupt
        Console().progress("")  # clears the line
        failed = failed_runs(root)
    write_results(settings, root)
    return failed


def run_job(settings: BenchSettings, root: Path, data: Path | None) -> None:
    """Start the workers, and after a failed run again without it, until all runs are finished or failed."""
    command = ["-m", "pufferfish.lab.bench.bench_worker", str(root)]
    command += ["--data", str(data.resolve())] if data else []
    while True:
        before = failed_runs(root)
        code = launch_workers(
            command, network=settings.network, hosts=settings.nodes, per_host=settings.per_node
        )
        if code == 130:
            raise KeyboardInterrupt
        failed = failed_runs(root)
        if not code or TIMING in failed:
            return
        if failed == before:
            raise OSError(f"the workers failed with exit code {code}")
        Console().info("continuing with the other runs")


def run_bench(settings: BenchSettings, root: Path, **arguments: Any) -> int:
    """Run `bench` as a command. Returns 0, 1 if runs failed, or 130 if it was stopped."""
    try:
        failed = bench(settings, root, **arguments)
    except KeyboardInterrupt:
        line = "\n" * sys.stderr.isatty()  # the terminal shows ^C, perhaps after a line of progress
        print(f"{line}stopped; finished runs are kept, rerun the same command to resume", file=sys.stderr)
        return 130
    if failed:
        print(f"not finished: {', '.join(failed)}; rerun the same command to retry", file=sys.stderr)
    return 1 if failed else 0


def check_method(
    method: str, settings: BenchSettings, task: Task, recipe: Recipe, steps_per_epoch: int
) -> None:
    """Raise the errors that a run of the method would raise at its start."""
    parsed = training_method(method)
    recipe = parsed.recipe(recipe)
    settings.run_settings(method, recipe).check(task, 1 if settings.simulate else settings.workers)
    if parsed.pruning is not None:
        model = task.build()
        optimizer = build_optimizer(model, recipe)
        lengths = {"epochs": recipe.epochs, "steps_per_epoch": steps_per_epoch}
        try:
            build_pruning_change(parsed.pruning, model, optimizer, **lengths)
        except ValueError as error:
            raise ValueError(f"--methods {method}: {error}") from None


def has_work(settings: BenchSettings, root: Path) -> bool:
    """Whether runs or timed rounds are missing."""
    task, recipe = settings.resolve()
    if not all(is_finished(root / run.name) for run in bench_runs(settings, recipe) if run.lr is None):
        return True
    if any(untried_runs(method, settings, root, task, recipe) for method in settings.methods):
        return True
    return settings.timed and bool(untimed_methods(settings, root))


def write_results(settings: BenchSettings, root: Path) -> None:
    """Write the summary, the tuned rates and the page into the folder, and print the table."""
    task, recipe = settings.resolve()
    chosen = {m: choose_rate(m, settings, root, task, recipe) for m in settings.methods if settings.tune}
    rates = {method: rate for method, rate in chosen.items() if rate is not None}
    write_summary(root, settings.methods, rates)
    settings.save(root, rates={method: asdict(rate) | {"edge": rate.edge} for method, rate in rates.items()})
    if not any((root / "runs").glob("*/*/run.json")):
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(terminal_table(root, width))
    write(report([root], title=f"{settings.task}: comparison of methods"), root / PAGE)
    print(f"\n{root / PAGE}: open it in a browser")


#: Columns by their first words, the least important first.
_SPARE = (
    "seeds", "MACs", "peak memory", "peak rate", "largest exchange", "bytes per round", "bytes per step", "run time",
    "run speedup", "parameters", "utilisation", "difference", "step speedup", "step time",
)  # fmt: skip


def terminal_table(root: Path, width: int | None = None) -> str:
    """The main table of the page as text; empty columns are left out.

    Args:
        width: leave out more columns, the least important first, where the table is wider than this.
    """
    return "\n\n".join(_table(comparison, width) for comparison in compare_runs(find_runs([root])))


def _table(comparison: Comparison, width: int | None) -> str:
    found, reference = headline(comparison), comparison.reference
    title, against = comparison.title, ""
    if reference:
        title, against = f"{title}, compared with {reference.name}", f" vs. {reference.name}"
    heads = [head.removesuffix(against) for head in found.columns]
    texts = [[cell.text for cell in row] for row in found.rows]
    columns = [c for c in zip(heads, *texts, strict=True) if {*c[1:]} - {"–", format_bytes(0)}]
    spare = [head for name in _SPARE for head in heads if head.startswith(name)]
    spare.append(comparison.metric.label)  # after all the others, so that any table fits
    whole = Table([*zip(*columns, strict=True)], left=(0,), spare=spare)
    table = whole if width is None else whole.fitted(width)
    missing = [head for head in whole.rows[0] if head not in table.rows[0]]
    hint = [f"left out: {', '.join(missing)}; the page shows all"] * bool(missing)

    def fill(texts: Sequence[str]) -> list[str]:
        return [text if width is None else textwrap.fill(text, width) for text in texts]

    return "\n".join([*fill([title]), "", str(table), *fill(hint), "", *fill(found.notes)])
