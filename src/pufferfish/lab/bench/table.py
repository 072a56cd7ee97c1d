"""A bench's table for the terminal: the report's figures, the most asked for first."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path

from ...table import aligned
from ..report.groups import Comparison, Group, comparisons, find
from ..report.headline import difference, median, notes, reached, score, speed, step
from ..report.numbers import nbytes, seconds
from .asked import ALWAYS


def table(root: Path, target: float | None = None) -> str:
    """A line for each method: how fast, and against what; what was predicted; how good; how much it sends."""
    return "\n\n".join(_one(comparison, target) for comparison in comparisons(find([root])))


def _one(comparison: Comparison, target: float | None) -> str:
    by_name = {group.name: group for group in comparison.groups}
    references = [by_name[name] for name in ALWAYS if name in by_name]
    head = ["method", "a step", *(f"× {group.name}" for group in references), "predicted"]
    head += [comparison.measure.label] + [f"to {g.name}" for g in [comparison.reference] if g]
    head += ["bytes a step", "whole run"] + ([] if target is None else [f"to {target:g}"])
    rows = [head]
    for group in comparison.groups:
        row = [group.name, step(group).text]
        row += [_speed(other, group) for other in references]
        row += [_predicted(group), score(comparison, group).text]
        row += [difference(comparison, group).text] * (comparison.reference is not None)
        row += [median(group.results("bytes_a_step"), nbytes).text, median(group.wholes(), seconds).text]
        rows.append(row + ([] if target is None else [reached(group, comparison, target).text]))
    said = [textwrap.fill(note, 110) for note in notes(comparison)]
    return "\n".join([comparison.title, "", aligned(rows, left=(0,)), "", *said])


def _speed(reference: Group, group: Group) -> str:
    """How many times as fast as the reference; against the first, with the quartiles."""
    cell = speed(reference, group)
    if cell.value is None or reference is group:
        return "–"
    quarters = cell.text[cell.text.find("(") :] if reference.name == ALWAYS[0] and "(" in cell.text else ""
    return f"{cell.value:.2f}× {quarters}{'predicted' * cell.text.endswith('predicted')}".strip()


def _predicted(group: Group) -> str:
    """The cost model's step, and how far off it was."""
    said, got = (f("seconds_a_step") for f in (group.predictions, group.results))
    if not said or not got:
        return "–"
    a, b = statistics.median(said.values()), statistics.median(got.values())
    return f"{seconds(a)} {100 * (a / b - 1):+.0f} %".replace("-", "−")
