"""The table that people look at first, and what has to be known to read it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from .bench_folder import CEILING
from .curves import first_to
from .groups import Comparison, Group, clocked, seed_of, trainings
from .numbers import count, faster, interval, millions, nbytes, seconds
from .statistics import differences, estimate, ratio
from .tables import Cell, Table, flat


def headline(comparison: Comparison, target: float | None = None) -> Table:
    """A line for each method: how large, how good, how fast, how much on the wire."""
    measure, reference = comparison.measure, comparison.reference
    against = reference.name if reference else ""
    counted = any(group.results("macs") for group in comparison.groups)
    columns = ["method", "parameters", *["MACs"] * counted, measure.label]
    columns += [f"difference to {against}"] * bool(reference) + ["a step"]
    columns += [f"step against {against}"] * bool(reference) + ["whole run"]
    columns += [f"run against {against}"] * bool(reference)
    columns += [] if target is None else [f"time to {target:g}"]
    sent = [x for group in comparison.groups for x in group.results("bytes_a_step").values()]
    sizes = ["bytes_a_step"] * (any(sent) or not sent) + ["peak_memory"]
    columns += [*(key.replace("_", " ") for key in sizes), "seeds"]
    speeds = {group.name: step_ratio(reference, group) for group in comparison.groups}
    fastest = max((s[0] for s in speeds.values() if s), default=1.0)
    rows = []
    for group in comparison.groups:
        row = [Cell(group.name), median(group.results("parameters"), count)]
        row += [median(group.results("macs"), millions)] * counted + [score(comparison, group)]
        if reference:
            row.append(difference(comparison, group))
        row.append(step(group))
        if reference:
            row.append(speed(reference, group, fastest) if group is not reference else Cell())
        row.append(median(group.wholes(), seconds))
        if reference:
            whole = run_ratio(reference, group)
            row.append(_speed((whole, False) if whole else None) if group is not reference else Cell())
        if target is not None:
            row.append(reached(group, comparison, target))
        row += [median(group.results(key), nbytes) for key in sizes]
        rows.append(
            [*row, Cell() if group.name == CEILING else Cell(str(len(group.finished)), len(group.finished))]
        )
    return Table("Methods side by side", columns, rows, notes(comparison))


def notes(comparison: Comparison) -> list[str]:
    """What has to be known to read the table."""
    measure, reference = comparison.measure, comparison.reference
    scores = [score(comparison, group) for group in comparison.groups]
    intervals = any(cell.half is not None for cell in scores)
    said = ["± is half of a 95 % interval (Student's t) over seeds."] * intervals
    if any(cell.value is not None for cell in scores):
        said.append(f"{'More' if measure.higher else 'Less'} {measure.name} is better.")
    if any(group.results("macs") for group in comparison.groups):
        said.append(
            "MACs are those of a forward pass for one row of a batch, by the model at the end of the run."
        )
    if reference is None:
        said.append(
            "Nothing to compare with: none of the runs is named bf16 or dense (--against takes another)."
        )
    else:
        said.append(
            f"Differences to {reference.name} are paired by seed"
            f"{'; “better” and “worse” stand only where the interval leaves 0 out' * intervals}. Speed against {reference.name} is the median of the seeds' ratios, for one step and for "
            "the whole run, warm-up included; below 1 it is slower."
        )
    counts = sorted({group.rounds["count"] for group in comparison.groups if group.rounds})
    if counts:
        said.append(
            f"A step is the median of {'–'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} timed in rounds in which all "
            "methods took turns, each with its model as it is at the end of its run; its speed the median of the rounds' ratios, from the lower "
            "to the upper quartile in brackets."
        )
    if any(group.name == CEILING for group in comparison.groups):
        said.append(f"“{CEILING}” is dense DDP's step without any.")
    for group in comparison.groups:
        said += dict.fromkeys(note for run in group.runs for note in run.results.get("notes") or ())
        late = [str(seed_of(run)) for run in group.runs if not run.finished]
        if late:
            said.append(f"{group.name}: seed {', '.join(late)} did not finish; in the curves only.")
        if (
            reference
            and group.finished
            and not {*map(seed_of, group.finished)} & {*map(seed_of, reference.finished)}
        ):
            said.append(
                f"{group.name}: no finished seed in common with {reference.name}, so nothing is paired."
            )
        if reference and group.wholes() and reference.wholes() and group.steps() != reference.steps():
            said.append(
                f"{group.name}: another number of steps than {reference.name}; whole runs are not compared."
            )
        broken = [str(seed_of(run)) for run in group.finished if run.results.get(measure.name, 0.0) is None]
        if broken:
            said.append(f"{group.name}: seed {', '.join(broken)} ended with no number for {measure.name}.")
        often = max((len(trainings(run)) for run in group.finished), default=0)
        if often:
            said.append(
                f"{group.name}: its whole run is {often} trainings. Its parameters and MACs are those that are not zero; "
                "its steps compute with all of them."
            )
        said += _differing(group)
    return said


def _differing(group: Group) -> list[str]:
    """Seeds are replicas: what else differs between a method's runs is said."""
    found = [flat(run.settings) for run in group.runs]
    keys = [key for key in dict.fromkeys(k for run in found for k in run) if key != "seed"]
    differing = [key for key in keys if len({run.get(key) for run in found}) > 1]
    return [f"{group.name}: its runs differ in {', '.join(differing)}, not in the seed alone."] * bool(
        differing
    )


def median(values: Mapping[int, float], show: Callable[[float], str]) -> Cell:
    if not values:
        return Cell()
    middle = statistics.median(values.values())
    return Cell(show(middle), middle)


def score(comparison: Comparison, group: Group) -> Cell:
    """How good it is, over its seeds."""
    measure = comparison.measure
    value = estimate([x * measure.scale for x in group.results(measure.name).values()])
    return Cell() if value is None else Cell(interval(value, measure.places), value.mean, value.half)


def difference(comparison: Comparison, group: Group) -> Cell:
    measure, reference = comparison.measure, comparison.reference
    assert reference is not None
    gaps = differences(group.results(measure.name), reference.results(measure.name))
    value = estimate([gap * measure.scale for gap in gaps])
    if value is None or group is reference:
        return Cell()
    text = interval(value, measure.places, sign=True)
    if not value.settled:
        return Cell(text, value.mean, value.half)
    better = (value.mean > 0) == measure.higher
    return Cell(
        f"{text}, {'better' if better else 'worse'}", value.mean, value.half, "good" if better else "bad"
    )


def step(group: Group) -> Cell:
    measured = group.results("seconds_a_step")
    if measured:
        return median(measured, seconds)
    said = median(group.predictions("seconds_a_step"), seconds)
    return Cell(f"{said.text} predicted", said.value) if said.value is not None else said


def step_ratio(reference: Group | None, group: Group) -> tuple[float, bool] | None:
    """How many times as fast a step is, and whether that is predicted."""
    if reference is None:
        return None
    timed = quarters(reference, group)
    if timed is not None:
        return timed[1], False
    for key, said in (("results", False), ("predictions", True)):
        found = ratio(getattr(reference, key)("seconds_a_step"), getattr(group, key)("seconds_a_step"))
        if found is not None:
            return found, said
    return None


def quarters(reference: Group, group: Group) -> tuple[float, float, float] | None:
    """Quartiles of the speed-up over the rounds of a bench, if one timed both."""
    found = group.rounds.get("against", {}).get(reference.name)
    return tuple(found) if found else None


def run_ratio(reference: Group, group: Group) -> float | None:
    return ratio(reference.wholes(), group.wholes()) if group.steps() == reference.steps() else None


def _speed(found: tuple[float, bool] | None, fastest: float | None = None) -> Cell:
    if found is None:
        return Cell()
    value, said = found
    tone = "bad" if round(value, 2) < 1 else "good" if round(value, 2) > 1 else ""
    text = faster(value) + (" predicted" if said else "")
    return Cell(text, value, tone=tone, share=value / fastest if fastest else None)


def speed(reference: Group, group: Group, fastest: float | None = None) -> Cell:
    """How many times as fast a step is, from the lower to the upper quartile of the rounds where there are some."""
    cell, timed = _speed(step_ratio(reference, group), fastest), quarters(reference, group)
    if timed is None:
        return cell
    return replace(cell, text=f"{cell.text} ({timed[0]:.2f}–{timed[2]:.2f})")


def reached(group: Group, comparison: Comparison, target: float) -> Cell:
    """How long it took to a validation score."""
    times = {seed_of(run): first_to(run, comparison.measure, target) for run in group.runs if clocked(run)}
    reached = {seed: at for seed, at in times.items() if at is not None}
    cell = median(reached, seconds)
    missed = len(times) - len(reached)
    return Cell(f"{cell.text} ({missed} not)", cell.value) if reached and missed else cell
