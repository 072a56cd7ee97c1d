"""`terminal_table`: the results of a bench as a text table."""

import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ...planning.table import Table, format_count
from ..report.bench_folder import NO_EXCHANGE
from ..report.comparison import Comparison, MethodRuns, compare_runs, find_runs
from ..report.exchange_table import exchange_table
from ..report.formatting import format_bytes, format_seconds
from ..report.headline import (
    difference_cell,
    median_cell,
    notes,
    round_quartiles,
    run_speedup,
    score_cell,
    step_cell,
    step_speedup,
)
from .bench_settings import REFERENCES


def terminal_table(root: Path, width: int | None = None) -> str:
    """One row per method: size, times, speedups, quality and traffic; empty columns are left out.

    Args:
        width: leave out more columns, the least important first, where the table is wider than this.
    """
    return "\n\n".join(_table(comparison, width) for comparison in compare_runs(find_runs([root])))


def _table(comparison: Comparison, width: int | None) -> str:
    by_name = {method.name: method for method in comparison.methods}
    references = [by_name[name] for name in REFERENCES if name in by_name]
    reference = comparison.reference
    rates_differ = len({*map(_learning_rate, comparison.methods)} - {"–"}) > 1
    columns: dict[str, Callable[[MethodRuns], str]] = {
        "method": lambda method: method.name,
        **({"learning rate": _learning_rate} if rates_differ else {}),
        "parameters": lambda method: median_cell(method.results("parameters"), format_count).text,
        "MACs": lambda method: median_cell(method.results("macs"), format_count).text,
        "step": lambda method: step_cell(method).text,
    }
    columns |= {f"vs. {other.name}": partial(_step_speedup, other) for other in references}
    columns["predicted"] = _prediction
    columns[comparison.metric.label] = lambda method: score_cell(comparison, method).text
    if reference:
        columns[f"difference vs. {reference.name}"] = lambda method: difference_cell(comparison, method).text
    columns["bytes/step"] = lambda method: median_cell(method.results("bytes_a_step"), format_bytes).text
    exchange = exchange_table(comparison)
    if exchange:
        cells_of = {row[0].text: row for row in exchange.rows}
        for place in (1, 3, 4, 5):  # bytes of an update are in the table already
            columns[exchange.columns[place]] = lambda method, n=place: cells_of[method.name][n].text  # type: ignore[misc]
    columns["run"] = lambda method: median_cell(method.run_seconds(), format_seconds).text
    if reference:
        columns[f"run vs. {reference.name}"] = partial(_run_speedup, reference)
    cells = {head: [show(method) for method in comparison.methods] for head, show in columns.items()}
    shown = [[head, *column] for head, column in cells.items() if {*column} - {"–", format_bytes(0)}]
    spare = ["MACs", "predicted", "learning rate"]  # the first is left out first
    spare += reversed(exchange.columns[3:]) if exchange else []
    spare += ["bytes/step", *([f"run vs. {reference.name}"] if reference else []), "run"]
    spare += [*(f"vs. {other.name}" for other in references[1:]), "parameters", "utilisation"]
    spare += [f"difference vs. {reference.name}"] if reference else []
    spare += [head for head in reversed(columns) if head not in ("method", comparison.metric.label, *spare)]
    spare.append(comparison.metric.label)  # after all the others, so that any table fits
    rows = [*zip(*shown, strict=True)]
    table, heads = _fitted(rows, spare, width)
    parts = [_fill(comparison.title, width), "", table, ""]
    parts += [_fill(note, width or 110) for note in notes(comparison, columns.keys() - heads)]
    return "\n".join(parts)


def _fill(text: str, width: int | None) -> str:
    return text if width is None else textwrap.fill(text, width)


def _fitted(
    rows: Sequence[Sequence[str]], spare: Sequence[str], width: int | None
) -> tuple[str, Sequence[str]]:
    """The table, with the names of columns that it lacks because the terminal is too narrow; and the heads of its columns."""
    table = Table(rows, left=(0,), spare=spare)
    fitted = table if width is None else table.fitted(width)
    missing = [head for head in rows[0] if head not in fitted.rows[0]]
    hint = _fill(f"left out: {', '.join(missing)}; the page shows all", width) if missing else ""
    return f"{fitted}\n{hint}".rstrip(), fitted.rows[0]


def _step_speedup(reference: MethodRuns, method: MethodRuns) -> str:
    """Speedup of a step; over the first reference, with its quartiles."""
    speedup = step_speedup(reference, method)
    if speedup is None or reference is method:
        return "–"
    value, predicted = speedup
    quartiles = round_quartiles(reference, method) if reference.name == REFERENCES[0] else None
    suffix = f" ({quartiles[0]:.2f}–{quartiles[2]:.2f})" if quartiles else " (predicted)" * predicted
    return f"{value:.2f}×{suffix}"


def _learning_rate(method: MethodRuns) -> str:
    """The learning rate of the runs: that of the recipe, of the method's optimizer, or the tuned one."""
    rates = {run.settings.get("recipe", {}).get("lr") for run in method.runs if method.name != NO_EXCHANGE}
    return ", ".join(f"{lr:.3g}" for lr in rates if lr is not None) or "–"


def _run_speedup(reference: MethodRuns, method: MethodRuns) -> str:
    speedup = None if method is reference else run_speedup(reference, method)
    return "–" if speedup is None else f"{speedup:.2f}×"


def _prediction(method: MethodRuns) -> str:
    """The predicted step time, with its relative error."""
    predicted, measured = (f("seconds_a_step") for f in (method.predictions, method.results))
    if not predicted or not measured:
        return "–"
    expected, actual = statistics.median(predicted.values()), statistics.median(measured.values())
    return f"{format_seconds(expected)} {100 * (expected / actual - 1):+.0f} %".replace("-", "−")
