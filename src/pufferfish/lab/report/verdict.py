"""`verdict`: what a comparison says, in one or two sentences."""

from .bench_folder import NO_EXCHANGE
from .comparison import Comparison, MethodRuns
from .formatting import format_estimate, format_speedup
from .headline import difference_cell, run_speedup, score_cell, step_speedup
from .seed_statistics import Estimate


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
