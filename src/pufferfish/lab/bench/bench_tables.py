"""`bench_tables`: the tables of a bench, finished or not: what came out, and what is still missing."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ..report.comparison import Comparison, MethodRuns, compare_runs, find_runs
from ..report.equal_table import at_equal, equal_tables
from ..report.headline import difference_cell, headline
from ..report.tables import Cell, Table
from .bench_runs import BenchRun, bench_runs, is_finished
from .bench_settings import REFERENCES, BenchSettings
from .choose_rate import choose_rate, untried_runs
from .network_table import network_table
from .summary import write_summary


def bench_tables(settings: BenchSettings, root: Path, against: Sequence[str] = ()) -> list[Table]:
    """Results with differences to dense, differences to further methods, results at equal time or bytes, and the progress.

    Methods without a finished run have empty rows.

    Args:
        against: methods to which all others are compared, too.
    """
    task, recipe = settings.resolve()
    rates = {m: choose_rate(m, settings, root, task, recipe) for m in settings.methods if settings.tune}
    chosen = {method: rate for method, rate in rates.items() if rate is not None}
    settings.save(root, rates={method: asdict(rate) | {"edge": rate.edge} for method, rate in chosen.items()})
    write_summary(root, settings.methods, chosen)
    tables: list[Table] = []
    if any((root / "runs").glob("*/*/run.json")):
        for comparison in compare_runs(find_runs([root]), _reference(settings, root)):
            complete = _with_missing(comparison, settings)
            tables += [_main_table(complete), *_differences(complete, against), *equal_tables(complete)]
            tables += [table] if (table := network_table(complete)) is not None else []
    return [*tables, progress_table(settings, root)]


def progress_table(settings: BenchSettings, root: Path) -> Table:
    """Finished runs of each method: of the tuning, at equal steps, and at equal time or bytes; and the chosen rate."""
    task, recipe = settings.resolve()
    kinds = {"tuning": settings.tune > 0, "seeds": True, f"equal {settings.equal}": settings.equal != "steps"}
    rows = []
    for method in settings.methods:
        runs = [run for run in bench_runs(settings, recipe) if run.method == method]
        rate = choose_rate(method, settings, root, task, recipe)
        row = [
            Cell(method),
            Cell() if rate is None else Cell(f"{rate.lr:.3g}{', at the edge' * bool(rate.edge)}"),
        ]
        for kind in (kind for kind, shown in kinds.items() if shown):
            of_kind = [run for run in runs if _kind(run) == kind]
            done = sum(is_finished(root / run.name) for run in of_kind)
            count = len(of_kind)
            if kind == "tuning":  # not all rates of the grid need be tried
                count = done + len(untried_runs(method, settings, root, task, recipe))
            row.append(Cell(f"{done} of {count}") if of_kind else Cell())
        rows.append(row)
    columns = ["method", "learning rate", *(kind for kind, shown in kinds.items() if shown)]
    return Table("Finished runs", columns, rows)


def _main_table(comparison: Comparison) -> Table:
    """The headline, with a note about times of runs that shared a device."""
    table = headline(comparison)
    if not any(run.results.get("shared") for run in comparison.runs):
        return table
    simulated = any(run.settings.get("simulated") for run in comparison.runs)
    note = "Several runs shared the device. " + (
        "Step times are predicted from computation that was measured afterwards, without other runs."
        if simulated
        else "Step times were measured afterwards, without other runs and in turns with dense steps; the time of a run is that of its updates."
    )
    return replace(table, notes=[*table.notes, note])


def _kind(run: BenchRun) -> str:
    if run.lr is not None:
        return "tuning"
    return "seeds" if run.equal == "steps" else f"equal {run.equal}"


def _reference(settings: BenchSettings, root: Path) -> str | None:
    """The dense method, if one of its runs is there."""
    dense = (root / BenchRun(REFERENCES[0], seed).name for seed in range(settings.seeds))
    return REFERENCES[0] if any((folder / "run.json").is_file() for folder in dense) else None


def _with_missing(comparison: Comparison, settings: BenchSettings) -> Comparison:
    """The comparison with all methods of the bench, in its order."""
    found = {method.name: method for method in comparison.methods}
    methods = [found.pop(name, MethodRuns(name, ())) for name in settings.methods]
    return replace(comparison, methods=(*methods, *found.values()))


def _differences(comparison: Comparison, against: Sequence[str]) -> list[Table]:
    """Differences to several methods, at equal steps and at equal time or bytes."""
    kinds = {"steps": comparison} | {kind: at_equal(comparison, kind) for kind in comparison.equal}
    tables = []
    for kind, each in kinds.items():
        references = [method for name in against for method in each.methods if method.name == name]
        rows = [
            [
                Cell(method.name),
                *(difference_cell(replace(each, reference=other), method) for other in references),
            ]
            for method in each.methods
        ]
        if references:
            columns = ["method", *(f"vs. {method.name}" for method in references)]
            tables.append(Table(f"Differences at equal {kind}: {comparison.metric.label}", columns, rows))
    return tables
