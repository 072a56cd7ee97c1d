"""The tables of a comparison: the main one with the verdict above it, and the set-up of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .comparison import (
    NO_EXCHANGE,
    Comparison,
    Estimate,
    MethodRuns,
    as_text,
    estimate,
    is_number,
    paired_differences,
    paired_speedup,
    seed_of,
    trainings,
)
from .formatting import format_bytes, format_estimate, format_number, format_seconds, format_speedup


def headline(comparison: Comparison) -> Table:
    """Size, quality, speed and traffic of each method."""
    metric, reference = comparison.metric, comparison.reference
    sent = [x for method in comparison.methods for x in method.results("bytes_a_step").values()]
    sizes = ["bytes_a_step"] * (any(sent) or not sent) + ["peak_memory"]
    local = _has_local_steps(comparison)
    rows = []
    for method in comparison.methods:
        row = {"method": Cell(method.name)}
        row["parameters"] = median_cell(method.results("parameters"), "{:,.0f}".format)
        if any(other.results("macs") for other in comparison.methods):
            row["MACs"] = median_cell(method.results("macs"), lambda n: f"{format_number(n / 1e6)} M")
        row[metric.label] = score_cell(comparison, method)
        if reference:
            row[f"difference vs. {reference.name}"] = difference_cell(comparison, method)
        row["step time"] = step_cell(method)
        if reference:
            row[f"step speedup vs. {reference.name}"] = _step_speedup_cell(reference, method)
        row["run time"] = median_cell(method.run_seconds(), format_seconds)
        if reference:
            whole = run_speedup(reference, method) if method is not reference else None
            row[f"run speedup vs. {reference.name}"] = _speedup_cell((whole, False) if whole else None)
        if local:
            row |= _exchange_cells(method)
        row |= {label(key): median_cell(method.results(key), format_bytes) for key in sizes}
        seeds = len(method.finished)
        row["seeds"] = Cell() if method.name == NO_EXCHANGE else Cell(str(seeds), seeds)
        rows.append(row)
    cells = [list(row.values()) for row in rows]
    return Table("Comparison of methods", list(rows[0]), cells, notes(comparison))


def notes(comparison: Comparison) -> list[str]:
    """How the figures of the table are computed, and what is missing or differs between runs."""
    metric, reference, methods = comparison.metric, comparison.reference, comparison.methods
    scores = [score_cell(comparison, method) for method in methods]
    intervals = any(cell.half is not None for cell in scores)
    lines = ["± is half the width of a 95 % confidence interval (Student's t) over seeds."] * intervals
    if any(cell.value is not None for cell in scores):
        lines.append(f"{'Higher' if metric.higher else 'Lower'} {metric.words} is better.")
    if any(method.results("macs") for method in methods):
        lines.append("MACs are counted in a forward pass of the final model for one row of a batch.")
    if reference is None:
        lines.append(
            "No reference to compare with: no run is named bf16 or dense (--against selects another reference)."
        )
    else:
        signs = "; “better” and “worse” mean that the interval excludes 0" * intervals
        other = f"vs. {reference.name}"
        lines.append(
            f"Differences {other} are paired by seed{signs}. Speedups {other} are medians of the ratios per seed, for one step "
            "and for the whole run including its warm-up; below 1 is slower."
        )
    if counts := sorted({method.rounds["count"] for method in methods if method.rounds}):
        lines.append(
            f"Step times are medians over {'–'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} timed rounds. All "
            "methods take turns in each round, with their models as they are at the end of their runs. Step speedups are medians "
            "of the ratios per round, with lower and upper quartile in brackets."
        )
    if any(method.name == NO_EXCHANGE for method in methods):
        lines.append(f"“{NO_EXCHANGE}” is a bound, not a method: a step of dense DDP without communication.")
    if _has_local_steps(comparison):
        lines.append(_EXCHANGE_NOTE)
    for method in methods:
        lines += dict.fromkeys(note for run in method.runs for note in run.results.get("notes") or ())
        if unfinished := ", ".join(str(seed_of(run)) for run in method.runs if not run.finished):
            lines.append(f"{method.name}: seed {unfinished} did not finish; shown in the curves only.")
        if reference and method.finished:
            if not {*map(seed_of, method.finished)} & {*map(seed_of, reference.finished)}:
                lines.append(
                    f"{method.name}: no finished seed in common with {reference.name}, so not compared."
                )
            timed = method.run_seconds() and reference.run_seconds()
            if timed and method.steps() != reference.steps():
                lines.append(
                    f"{method.name}: not as many steps as {reference.name}; run times are not compared, and the difference "
                    f"in {metric.words} is not at equal steps."
                )
        failed = [str(seed_of(run)) for run in method.finished if run.results.get(metric.name, 0.0) is None]
        if failed:
            lines.append(f"{method.name}: seed {', '.join(failed)} ended without a finite {metric.words}.")
        if count := max((len(trainings(run)) for run in method.finished), default=0):
            lines.append(
                f"{method.name}: its run time includes {count} trainings. Its parameters and MACs count nonzero weights only; "
                "its steps compute with all of them."
            )
        settings = [flat(run.settings) for run in method.runs]
        keys = dict.fromkeys(key for each in settings for key in each if key != "seed")
        if differing := ", ".join(key for key in keys if len({each.get(key) for each in settings}) > 1):
            lines.append(f"{method.name}: its runs differ in {differing}, not only in the seed.")
    return lines


def median_cell(values: Mapping[int, float], show: Callable[[float], str]) -> Cell:
    """Median over seeds."""
    if not values:
        return Cell()
    median = statistics.median(values.values())
    return Cell(show(median), median)


def score_cell(comparison: Comparison, method: MethodRuns) -> Cell:
    """Mean of the metric over seeds, with its interval."""
    metric = comparison.metric
    value = estimate([x * metric.scale for x in method.results(metric.name).values()])
    return Cell() if value is None else Cell(format_estimate(value, metric.places), value.mean, value.half)


def difference_cell(comparison: Comparison, method: MethodRuns) -> Cell:
    """Mean difference to the reference over the seeds that both have, with its interval."""
    metric, reference = comparison.metric, comparison.reference
    assert reference is not None
    differences = paired_differences(method.results(metric.name), reference.results(metric.name))
    value = estimate([difference * metric.scale for difference in differences])
    if value is None or method is reference:
        return Cell()
    text = format_estimate(value, metric.places, sign=True)
    if not value.significant:
        return Cell(text, value.mean, value.half)
    word, tone = ("better", "good") if (value.mean > 0) == metric.higher else ("worse", "bad")
    return Cell(f"{text}, {word}", value.mean, value.half, tone)


def step_cell(method: MethodRuns) -> Cell:
    """Time of a step, measured or else predicted."""
    measured = method.results("seconds_a_step")
    if measured:
        return median_cell(measured, format_seconds)
    cell = median_cell(method.predictions("seconds_a_step"), format_seconds)
    return Cell(f"{cell.text} (predicted)", cell.value) if cell.value is not None else cell


def step_speedup(reference: MethodRuns | None, method: MethodRuns) -> tuple[float, bool] | None:
    """Speedup of a step, and whether it is predicted."""
    if reference is None:
        return None
    quartiles = round_quartiles(reference, method)
    if quartiles is not None:
        return quartiles[1], False
    key = "seconds_a_step"
    measured = paired_speedup(reference.results(key), method.results(key))
    if measured is not None:
        return measured, False
    expected = paired_speedup(reference.predictions(key), method.predictions(key))
    return None if expected is None else (expected, True)


def round_quartiles(reference: MethodRuns, method: MethodRuns) -> tuple[float, float, float] | None:
    """Quartiles of the step speedup over the timed rounds of a bench; None without rounds."""
    quartiles = method.rounds.get("against", {}).get(reference.name)
    return tuple(quartiles) if quartiles else None


def run_speedup(reference: MethodRuns, method: MethodRuns) -> float | None:
    """Speedup of the whole run; None for runs with another number of steps."""
    if method.steps() != reference.steps():
        return None
    return paired_speedup(reference.run_seconds(), method.run_seconds())


def _speedup_cell(speedup: tuple[float, bool] | None) -> Cell:
    if speedup is None:
        return Cell()
    value, predicted = speedup
    tone = "bad" if round(value, 2) < 1 else "good" if round(value, 2) > 1 else ""
    text = format_speedup(value) + (" (predicted)" if predicted else "")
    return Cell(text, value, tone=tone)


def _step_speedup_cell(reference: MethodRuns, method: MethodRuns) -> Cell:
    if method is reference:
        return Cell()
    cell = _speedup_cell(step_speedup(reference, method))
    tone = "" if method.name == NO_EXCHANGE else cell.tone  # a bound is not a win
    quartiles = round_quartiles(reference, method)
    if quartiles is None:
        return Cell(cell.text, cell.value, tone=tone)
    return Cell(f"{quartiles[1]:.2f}× ({quartiles[0]:.2f}–{quartiles[2]:.2f})", cell.value, tone=tone)


_EXCHANGE_NOTE = (
    "Utilisation: computing time over the time of an update. Bytes are those that one worker sends. A round is the h updates in "
    "which local steps average the whole model once. Peak rate: rate that the largest exchange needs to be done within the "
    "updates until it is applied, or within one."
)


def _has_local_steps(comparison: Comparison) -> bool:
    return any(method.results("bytes_a_round") for method in comparison.methods)


def _exchange_cells(method: MethodRuns) -> dict[str, Cell]:
    """How much of the time a method computes, measured or predicted; what it sends in an exchange, and at which rate."""
    measured = method.results("utilisation")
    known = " (predicted)" * (not measured)
    share = median_cell(measured or method.predictions("utilisation"), lambda x: f"{100 * x:.1f} %{known}")
    a_round, peak = (
        median_cell(method.results(key), format_bytes) for key in ("bytes_a_round", "peak_bytes")
    )
    seconds = method.results("seconds_a_step") or method.predictions("seconds_a_step")
    rate = Cell()
    if peak.value and share.value and seconds:
        updates = statistics.median(method.results("exchange_updates").values() or [1])
        bits = 8 * peak.value / (updates * share.value * statistics.median(seconds.values()))
        rate = Cell(f"{format_number(bits / 1e6)} Mbit/s", bits)
    return {"utilisation": share, "bytes per round": a_round, "largest exchange": peak, "peak rate": rate}


def verdict(comparison: Comparison) -> str:
    """The fastest method that loses no quality, or else the fastest one and what it loses; never a bound."""
    reference = comparison.reference
    if reference is None:
        return _without_reference(comparison)
    others = [m for m in comparison.methods if m is not reference and m.name != NO_EXCHANGE]
    if not others:
        return f"{_score(comparison, reference)} There is no other method to compare with {reference.name}."
    speeds, what, predicted = _speeds(reference, others)
    if not speeds:
        compared = [m for m in others if difference_cell(comparison, m).value is not None]
        phrases = [f"{m.name} {_quality(comparison, m)}" for m in compared[:3]]
        more = f"; {len(compared) - 3} more are in the table" if len(compared) > 3 else ""
        found = f"{'; '.join(phrases)}{more}." if phrases else f"Nothing is comparable with {reference.name}."
        return f"{found} No times were recorded for both."
    ordered = sorted(others, key=lambda m: -speeds.get(m.name, 0.0))
    faster = [m for m in ordered if round(speeds.get(m.name, 0.0), 2) > 1]
    if not faster:
        closest = ordered[0]
        return (
            f"No method {what} faster than {reference.name}: the closest is {closest.name}, "
            f"{format_speedup(speeds[closest.name])}{', predicted' * predicted}. It {_quality(comparison, closest)}."
        )
    kept = [m for m in faster if difference_cell(comparison, m).tone != "bad"]
    best = (kept or faster)[0]
    said = (
        f"{best.name} {what} {format_speedup(speeds[best.name])} as fast as {reference.name}"
        f"{' (predicted)' * predicted} and {_quality(comparison, best)}."
    )
    if not kept and len(faster) > 1:
        return f"{said} Every faster method loses {comparison.metric.words}."
    if faster[0] is not best:
        fastest = faster[0]
        speed = format_speedup(speeds[fastest.name])
        said += f" {fastest.name} is faster, {speed}, but {_quality(comparison, fastest)}."
    return said


def _speeds(reference: MethodRuns, others: list[MethodRuns]) -> tuple[dict[str, float], str, bool]:
    """Speedups by method, of whole runs where they are known, else of steps; what they are of; whether they are predicted."""
    runs = {m.name: speedup for m in others if (speedup := run_speedup(reference, m))}
    if runs:
        return runs, "trains", False
    steps = {m.name: pair for m in others if (pair := step_speedup(reference, m))}
    measured = {name: speedup for name, (speedup, predicted) in steps.items() if not predicted}
    return measured or {name: x for name, (x, _) in steps.items()}, "computes a step", not measured


def _quality(comparison: Comparison, method: MethodRuns) -> str:
    """The difference in quality as a phrase. A loss is called a loss."""
    phrase = _difference(comparison, method)
    reference = comparison.reference
    other_length = reference is not None and method.steps() != reference.steps()
    return f"{phrase}, in a run of another length" if other_length else phrase


def _difference(comparison: Comparison, method: MethodRuns) -> str:
    metric, cell = comparison.metric, difference_cell(comparison, method)
    if cell.value is None:
        return f"has no {metric.words} to compare"
    unit = " points" if metric.name == "accuracy" else ""
    amount = format_estimate(Estimate(abs(cell.value), cell.half, 1), metric.places) + unit
    worse = (cell.value < 0) == metric.higher
    if cell.half is None and round(abs(cell.value), metric.places) == 0:
        return f"has the same {metric.words} in one seed"
    if cell.half is not None and not cell.tone:
        signed = format_estimate(Estimate(cell.value, cell.half, 1), metric.places, sign=True)
        return f"differs by {signed}{unit} in {metric.words}, which may be chance"
    if metric.higher:
        phrase = f"{'loses' if worse else 'gains'} {amount} of {metric.words}"
    else:
        phrase = f"{'worsens' if worse else 'improves'} {metric.words} by {amount}"
    return phrase + (" in one seed, which may be chance" if cell.half is None else "")


def _score(comparison: Comparison, method: MethodRuns) -> str:
    score = score_cell(comparison, method)
    if score.value is None:
        return ""
    unit = " %" if comparison.metric.name == "accuracy" else ""
    return f"{method.name} reaches {comparison.metric.words} {score.text}{unit}."


def _without_reference(comparison: Comparison) -> str:
    scored = [m for m in comparison.methods if score_cell(comparison, m).value is not None]
    sign = 1 if comparison.metric.higher else -1
    best = max(scored, key=lambda m: sign * (score_cell(comparison, m).value or 0.0), default=None)
    found = _score(comparison, best) if best else "No run has a final score yet."
    return f"{found} There is no reference run, named bf16 or dense, to compare with."


@dataclass(frozen=True)
class Cell:
    """The text of a table cell, and its value for sorting."""

    text: str = "–"
    value: float | None = None
    half: float | None = None  # half the width of the 95 % interval
    tone: str = ""  # "good" or "bad"; the text says it too


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default=())


def label(key: str) -> str:
    """The name of a result as a column heading.

    >>> label("bytes_a_step"), label("peak_memory")
    ('bytes per step', 'peak memory')
    """
    return key.replace("_a_", "_per_").replace("_", " ")


def setup(comparison: Comparison) -> Table:
    """Hardware, software, link and seeds of the runs: a row for each property with all its values."""
    properties: dict[str, list[str]] = {}

    def add(name: str, value: object) -> None:
        if value not in (None, "", {}):
            properties.setdefault(name, []).append(as_text(value))

    for run in comparison.runs:
        add("task", run.settings.get("task"))
        add("mode", run.results.get("mode") or run.settings.get("mode"))
        add("workers", run.workers)
        add("hosts", run.hosts)
        for name, value in run.hardware.items():
            add(name, value)
        for name, value in (run.link or {}).items():
            if name not in ("got_mbit", "latency_ms"):
                add("link requested" if name == "asked" else f"link {name}", value)
        for name, value in run.versions.items():
            add(name, value)
        add("seeds", run.seed)
        add("started", (run.started or "")[:16].replace("T", " "))
    links = [run.link or {} for run in comparison.runs]
    for name, key, show in (
        ("link measured", "got_mbit", lambda x: f"{x:.4g} Mbit/s"),
        ("latency", "latency_ms", lambda x: format_seconds(x / 1e3)),
    ):
        values = [float(link[key]) for link in links if is_number(link.get(key))]
        if values:
            properties[name] = [" to ".join(dict.fromkeys(map(show, (min(values), max(values)))))]
    if len({*properties.get("seeds", ())}) == 1:
        properties = {"seed" if name == "seeds" else name: values for name, values in properties.items()}
    rows = [[Cell(name), Cell(", ".join(dict.fromkeys(values)))] for name, values in properties.items()]
    return Table("Setup", ["property", "value"], rows)


def flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings into one level of text.

    >>> flat({"lr": 0.1, "data": {"crop": True}})
    {'lr': '0.1', 'data.crop': 'true'}
    """
    texts: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            texts |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            texts[f"{prefix}{key}"] = f"{value:.7g}"
        else:
            texts[f"{prefix}{key}"] = as_text(value)
    return texts
