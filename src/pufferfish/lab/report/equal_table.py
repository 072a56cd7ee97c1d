"""`equal_tables`: the methods with as many updates as fit into the time, or the bytes, of the dense run."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...measure import Run
from .comparison import (
    Comparison,
    MethodRuns,
    equal_length,
    has_measured_time,
    is_number,
    length,
    seed_of,
)
from .formatting import format_bytes, format_seconds
from .headline import difference_cell, median_cell, score_cell
from .tables import Cell, Table


def equal_tables(comparison: Comparison) -> list[Table]:
    """A table at equal time, and one at equal bytes, if there are such runs: updates, time, bytes and quality."""
    return [_table(comparison, kind) for kind in comparison.equal]


def at_equal(comparison: Comparison, kind: str) -> Comparison:
    """The methods at equal "time" or "bytes", and the same reference with its updates there."""
    methods, reference = comparison.equal[kind], comparison.reference
    found = next((method for method in methods if reference and method.name == reference.name), None)
    return replace(comparison, methods=methods, reference=found, equal={})


def _table(comparison: Comparison, kind: str) -> Table:
    equal = at_equal(comparison, kind)
    at_equal_steps = {method.name: method for method in comparison.methods}
    reference, runs = equal.reference, equal.runs
    measured = all(map(has_measured_time, runs))
    clock = kind == "time" and not _links(runs) and measured
    shared = any(run.results.get("shared") for run in runs)
    time = "time" if (measured or shared) and not _links(runs) else "time, predicted"
    rows = []
    for method in equal.methods:
        row = {"method": Cell(method.name)}
        row["updates"] = _median(method, lambda run: length(run)[1], "{:,.0f}".format)
        row[time] = _median(method, lambda run: _seconds(run, runs, kind), format_seconds)
        if clock:
            row["clock"] = median_cell(method.run_seconds(), format_seconds)
        if any(map(_bytes, runs)):
            row["bytes"] = _median(method, _bytes, format_bytes)
        plain = at_equal_steps.get(method.name)
        row["equal steps"] = score_cell(comparison, plain) if plain else Cell()
        row[f"equal {kind}"] = score_cell(equal, method)
        if reference:
            row[f"vs. {reference.name}"] = difference_cell(equal, method)
        rows.append(row)
    cells = [list(row.values()) for row in rows]
    return Table(f"Equal {kind}: {comparison.metric.label}", list(rows[0]), cells, _notes(equal, kind, clock))


def _notes(equal: Comparison, kind: str, clock: bool) -> list[str]:
    links = ", ".join(_links(equal.runs))
    by = (
        f"by updates predicted for {links}"
        if links
        else "by updates timed in turns with dense on this device"
    )
    lines = [
        f"Every method makes as many updates as fit into the {kind} of the dense run{f', {by}' * (kind == 'time')}. Its "
        "learning-rate schedule and the moment of its switch are stretched to match; its learning rate is that of equal steps. "
        f"Epochs have whole numbers of updates, so a method may have a little less than the full {kind}."
    ]
    if clock:
        lines.append(
            "“time” is that of the updates; “clock” is that of the runs, with the switch and compilation."
        )
    for method in equal.methods:
        lines += dict.fromkeys(note for run in method.runs if (note := equal_length(run).get("note")))
        if unfinished := ", ".join(str(seed_of(run)) for run in method.runs if not run.finished):
            lines.append(f"{method.name}: seed {unfinished} did not finish at equal {kind}.")
    return lines


def _median(method: MethodRuns, value: Callable[[Run], float | None], show: Callable[[float], str]) -> Cell:
    values = {seed_of(run): value(run) for run in method.finished}
    return median_cell({seed: x for seed, x in values.items() if x is not None}, show)


def _links(runs: Sequence[Run]) -> list[str]:
    """Links for which times are predicted."""
    return list(dict.fromkeys(str(link) for run in runs if (link := equal_length(run).get("link"))))


def _seconds(run: Run, runs: Sequence[Run], kind: str) -> float | None:
    """Seconds of all updates of a run at equal time; at equal bytes, those of the run.

    Each method is timed beside dense, so that only relative times are comparable; all are scaled to one dense time.
    """
    seconds, updates = length(run)
    if kind == "bytes":
        return seconds
    timed = [x["seconds"] for x in map(equal_length, runs) if isinstance(x.get("seconds"), dict)]
    if not timed:
        return None
    own = equal_length(run).get("seconds")
    relative = own["mean"] / own["dense"] if own else 1.0
    return float(updates * relative * statistics.median(x["dense"] for x in timed))


def _bytes(run: Run) -> float | None:
    sent = run.results.get("bytes")
    return float(sent) if is_number(sent) and sent else None
