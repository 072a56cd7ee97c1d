"""What a reader wants to know first: a few large figures."""

from __future__ import annotations

from dataclasses import dataclass

from .bench_folder import CEILING
from .groups import Comparison, Group
from .headline import difference, median, quarters, run_ratio, step, step_ratio
from .numbers import faster, nbytes, seconds
from .tables import Cell


@dataclass(frozen=True)
class Finding:
    """One figure, whose it is, and what it means."""

    what: str
    figure: str
    method: str
    note: str


def findings(comparison: Comparison) -> list[Finding]:
    """The fastest step, the fastest run, the fewest bytes, what the fastest costs; none without a reference."""
    reference = comparison.reference
    others = [group for group in comparison.groups if group is not reference and group.name != CEILING]
    if reference is None:
        return []
    pairs = {group.name: pair for group in others if (pair := step_ratio(reference, group))}
    measured = {name: speed for name, (speed, said) in pairs.items() if not said}
    steps = measured or {
        name: speed for name, (speed, _) in pairs.items()
    }  # a prediction never beats a measurement
    runs = {group.name: found for group in others if (found := run_ratio(reference, group))}
    by_name = {group.name: group for group in others}
    made = []
    if steps:
        best = by_name[max(steps, key=lambda name: steps[name])]
        note = "by the cost model, not measured"
        if measured:
            kind = "rounds" if quarters(reference, best) else "seeds"
            note = _times(steps[best.name], step(best), step(reference), kind)
        made.append(
            _fastest("a step" if measured else "a step, predicted", steps[best.name], best, reference, note)
        )
    if runs:
        best = by_name[max(runs, key=lambda name: runs[name])]
        ours, theirs = (median(group.wholes(), seconds) for group in (best, reference))
        note = _times(runs[best.name], ours, theirs, "seeds")
        made.append(_fastest("the whole run", runs[best.name], best, reference, note))
    made += _ceiling(comparison, reference) + _fewest(others, reference)
    for what, speeds in (("run", runs), ("step", steps)):
        best_name = max(speeds, key=lambda name: speeds[name], default=None)
        if best_name is not None and _gains(speeds[best_name]):
            return made + _price(comparison, by_name[best_name], what)
    return made


def _times(speed: float, ours: Cell, theirs: Cell, kind: str) -> str:
    """Both times, where they give the speed-up that they stand beside: a median of ratios is another figure."""
    if ours.value and theirs.value and abs(theirs.value / ours.value / speed - 1) < 0.01:
        return f"{ours.text} instead of {theirs.text}"
    return f"the median of the {kind}' ratios"


def _gains(speed: float) -> bool:
    return round(speed, 2) > 1


def _fastest(what: str, speed: float, group: Group, reference: Group, note: str) -> Finding:
    if not _gains(speed):
        return Finding(what, "nothing faster", reference.name, f"the next is {group.name}, {faster(speed)}")
    return Finding(what, f"{faster(speed)} as fast", group.name, note)


def _ceiling(comparison: Comparison, reference: Group) -> list[Finding]:
    """What is to be gained at most while the model stays as it is."""
    found = [(group, step_ratio(reference, group)) for group in comparison.groups if group.name == CEILING]
    note = "as if nothing had to be sent: what the dense model could gain at most"
    return [Finding("a step", f"{faster(x[0])} as fast", group.name, note) for group, x in found if x]


def _fewest(others: list[Group], reference: Group) -> list[Finding]:
    sent = {group.name: median(group.results("bytes_a_step"), nbytes) for group in (*others, reference)}
    base = sent.pop(reference.name)
    values = {name: cell.value for name, cell in sent.items() if cell.value}
    if not values or not base.value:
        return []
    best = min(values, key=lambda name: values[name])
    if values[best] >= base.value:
        return [Finding("bytes a step", "nothing sends less", reference.name, base.text)]
    figure = f"{base.value / values[best]:.1f}× fewer"
    return [Finding("bytes a step", figure, best, f"{sent[best].text} instead of {base.text}")]


def _price(comparison: Comparison, group: Group, what: str) -> list[Finding]:
    """How good the method with the fastest run or step is."""
    gap = difference(comparison, group)
    if gap.value is None:
        return []
    if gap.half is None:
        note = "one seed, so no interval"
    elif gap.tone:
        note = f"{'better' if gap.tone == 'good' else 'worse'}: the interval leaves 0 out"
    else:
        note = "not settled: the interval holds 0"
    said = f"{comparison.measure.name} of the fastest {what}"
    return [Finding(said, gap.text.split(",")[0], group.name, note)]
