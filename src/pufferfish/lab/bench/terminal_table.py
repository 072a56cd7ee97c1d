"""A bench's table for the terminal: the report's figures, the most asked for first."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...planning.table import aligned, short
from ..report.bench_folder import CEILING
from ..report.groups import Comparison, Group, comparisons, find
from ..report.headline import difference, median, notes, reached, run_ratio, score, speed, step
from ..report.numbers import nbytes, seconds
from .bench_settings import ALWAYS


def table(root: Path, target: float | None = None) -> str:
    """A line for each method: how large, how fast, and against what; what was predicted; how good; how much it sends.

    Columns that say nothing are left out: one worker sends nothing.
    """
    return "\n\n".join(_one(comparison, target) for comparison in comparisons(find([root])))


def _one(comparison: Comparison, target: float | None) -> str:
    by_name = {group.name: group for group in comparison.groups}
    references = [by_name[name] for name in ALWAYS if name in by_name]
    against = comparison.reference
    differ = len({*map(_rate, comparison.groups)} - {"–"}) > 1
    columns: dict[str, Callable[[Group], str]] = {
        "method": lambda group: group.name,
        **({"learning rate": _rate} if differ else {}),
        "parameters": lambda group: median(group.results("parameters"), short).text,
        "MACs": lambda group: median(group.results("macs"), short).text,
        "a step": lambda group: step(group).text,
    }
    columns |= {f"× {other.name}": partial(_speed, other) for other in references}
    columns |= {
        "predicted": _predicted,
        comparison.measure.label: lambda group: score(comparison, group).text,
    }
    if against:
        columns[f"to {against.name}"] = lambda group: difference(comparison, group).text
    columns["bytes a step"] = lambda group: median(group.results("bytes_a_step"), nbytes).text
    columns["whole run"] = lambda group: median(group.wholes(), seconds).text
    if against:
        columns[f"run × {against.name}"] = partial(_whole, against)
    if target is not None:
        columns[f"to {target:g}"] = lambda group: reached(group, comparison, target).text
    shown = {head: [show(group) for group in comparison.groups] for head, show in columns.items()}
    told = [[head, *cells] for head, cells in shown.items() if {*cells} - {"–", nbytes(0)}]
    said = [textwrap.fill(note, 110) for note in notes(comparison)]
    return "\n".join([comparison.title, "", aligned(list(zip(*told, strict=True)), left=(0,)), "", *said])


def _speed(reference: Group, group: Group) -> str:
    """How many times as fast as the reference; against the first, with the quartiles."""
    cell = speed(reference, group)
    if cell.value is None or reference is group:
        return "–"
    quarters = cell.text[cell.text.find("(") :] if reference.name == ALWAYS[0] and "(" in cell.text else ""
    return f"{cell.value:.2f}× {quarters}{'predicted' * cell.text.endswith('predicted')}".strip()


def _rate(group: Group) -> str:
    """The one that its runs took: the recipe's, or its optimizer's, or the one that tuning chose."""
    found = {run.settings.get("recipe", {}).get("lr") for run in group.runs if group.name != CEILING}
    return ", ".join(f"{lr:.3g}" for lr in found if lr is not None) or "–"


def _whole(reference: Group, group: Group) -> str:
    """How many times as fast as the reference's a whole run is."""
    found = None if group is reference else run_ratio(reference, group)
    return "–" if found is None else f"{found:.2f}×"


def _predicted(group: Group) -> str:
    """The cost model's step, and how far off it was."""
    said, got = (f("seconds_a_step") for f in (group.predictions, group.results))
    if not said or not got:
        return "–"
    a, b = statistics.median(said.values()), statistics.median(got.values())
    return f"{seconds(a)} {100 * (a / b - 1):+.0f} %".replace("-", "−")
