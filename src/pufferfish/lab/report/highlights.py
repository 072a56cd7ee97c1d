"""`highlights`: the few figures at the top of a comparison."""

from dataclasses import dataclass

from .bench_folder import NO_EXCHANGE
from .comparison import Comparison, MethodRuns
from .equal_table import at_equal
from .formatting import format_bytes, format_seconds, format_speedup
from .headline import difference_cell, median_cell, round_quartiles, run_speedup, step_cell, step_speedup
from .tables import Cell


@dataclass(frozen=True)
class Highlight:
    """One figure, the method it belongs to, and an explanation.

    Args:
        kind: "win"; "loss" of quality; "bound", which is no method; or "" for what is neither.
    """

    title: str
    figure: str
    method: str
    note: str
    kind: str = ""


def highlights(comparison: Comparison) -> list[Highlight]:
    """Fastest step and run, fewest bytes, quality of the fastest method and at equal time; empty without a reference."""
    reference = comparison.reference
    if reference is None:
        return []
    others = [m for m in comparison.methods if m is not reference and m.name != NO_EXCHANGE]
    by_name = {method.name: method for method in others}
    pairs = {name: pair for name, method in by_name.items() if (pair := step_speedup(reference, method))}
    measured = {name: speedup for name, (speedup, predicted) in pairs.items() if not predicted}
    # A prediction is never listed before a measurement.
    steps = measured or {name: speedup for name, (speedup, _) in pairs.items()}
    runs = {name: speedup for name, method in by_name.items() if (speedup := run_speedup(reference, method))}
    shown = []
    if steps:
        best = by_name[max(steps, key=lambda name: steps[name])]
        note = "predicted by the cost model, not measured"
        if measured:
            kind = "rounds" if round_quartiles(reference, best) else "seeds"
            note = _times(steps[best.name], step_cell(best), step_cell(reference), kind)
        title = "step time" if measured else "step time, predicted"
        shown.append(_fastest(title, steps[best.name], best, reference, note))
    if runs:
        best = by_name[max(runs, key=lambda name: runs[name])]
        ours, theirs = (median_cell(method.run_seconds(), format_seconds) for method in (best, reference))
        note = _times(runs[best.name], ours, theirs, "seeds")
        shown.append(_fastest("run time", runs[best.name], best, reference, note))
    shown += _no_exchange(comparison, reference) + _fewest_bytes(others, reference)
    for what, speedups in (("run", runs), ("step", steps)):
        fastest = max(speedups, key=lambda name: speedups[name], default=None)
        if fastest is not None and _is_faster(speedups[fastest]):
            shown += _quality(comparison, by_name[fastest], f"of the fastest {what}")
            break
    return shown + [h for kind in comparison.equal for h in _best_at_equal(at_equal(comparison, kind), kind)]


def _times(speedup: float, ours: Cell, theirs: Cell, kind: str) -> str:
    """Both times if their ratio is the speedup shown; a median of ratios can differ from it."""
    if ours.value and theirs.value and abs(theirs.value / ours.value / speedup - 1) < 0.01:
        return f"{ours.text} instead of {theirs.text}"
    return f"median of the ratios over {kind}"


def _is_faster(speedup: float) -> bool:
    return round(speedup, 2) > 1


def _fastest(title: str, speedup: float, method: MethodRuns, reference: MethodRuns, note: str) -> Highlight:
    if not _is_faster(speedup):
        note = f"the closest is {method.name}, {format_speedup(speedup)}"
        return Highlight(title, "no method is faster", reference.name, note)
    kind = "" if "predicted" in title else "win"
    return Highlight(title, f"{format_speedup(speedup)} as fast", method.name, note, kind)


def _no_exchange(comparison: Comparison, reference: MethodRuns) -> list[Highlight]:
    """The largest speedup that is possible without changing the model."""
    speedups = [(m, step_speedup(reference, m)) for m in comparison.methods if m.name == NO_EXCHANGE]
    title, note = "bound for the step time", "not a method: a step of the dense model without communication"
    return [
        Highlight(title, f"at most {format_speedup(s[0])}", m.name, note, "bound") for m, s in speedups if s
    ]


def _fewest_bytes(others: list[MethodRuns], reference: MethodRuns) -> list[Highlight]:
    sent = {m.name: median_cell(m.results("bytes_a_step"), format_bytes) for m in (*others, reference)}
    base = sent.pop(reference.name)
    values = {name: cell.value for name, cell in sent.items() if cell.value}
    if not values or not base.value:
        return []
    best = min(values, key=lambda name: values[name])
    if values[best] >= base.value:
        return [Highlight("bytes per step", "no method sends less", reference.name, base.text)]
    figure = f"{base.value / values[best]:.1f}× fewer"
    return [Highlight("bytes per step", figure, best, f"{sent[best].text} instead of {base.text}", "win")]


def _best_at_equal(equal: Comparison, kind: str) -> list[Highlight]:
    """Difference in quality of the best method at equal time or bytes."""
    others = [method for method in equal.methods if equal.reference and method is not equal.reference]
    found = [(cell.value, m) for m in others if (cell := difference_cell(equal, m)).value is not None]
    sign = 1 if equal.metric.higher else -1
    best = max(found, key=lambda pair: sign * pair[0], default=None)
    return _quality(equal, best[1], f"at equal {kind}, the best") if best else []


def _quality(comparison: Comparison, method: MethodRuns, what: str) -> list[Highlight]:
    """Difference in quality of a method."""
    cell = difference_cell(comparison, method)
    if cell.value is None:
        return []
    if cell.half is None:
        note = "one seed, so no interval"
    elif cell.tone:
        note = f"{'better' if cell.tone == 'good' else f'lost {comparison.metric.words}'}: the interval excludes 0"
    else:
        note = "not significant: the interval contains 0"
    title = f"{comparison.metric.words} {what}"
    kind = {"good": "win", "bad": "loss"}.get(cell.tone, "")
    return [Highlight(title, cell.text.split(",")[0], method.name, note, kind)]
