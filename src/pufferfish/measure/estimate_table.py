"""`estimate_table`: speed-up estimates as a text table."""

from collections.abc import Sequence

from ..planning.text import Table
from .speedup_estimate import SpeedupEstimate


def estimate_table(estimates: Sequence[SpeedupEstimate]) -> Table:
    """One row per estimate, with columns for measured times, intervals and the run's time if any estimate has them.

    >>> dense = SpeedupEstimate(
    ...     kind="", name="dense", step=0.1, speedup=1, run_speedup=1, hours=0.25, wire_bytes=1e6, measured=0.11
    ... )
    >>> print(estimate_table([dense]))
          ms/step  measured  error  MB sent   step    run    time
    dense     100       110    -9%        1  1.00×  1.00×  15 min
    """
    kinds = any(e.kind for e in estimates)
    measured = any(e.measured is not None for e in estimates)
    timed = any(e.hours is not None for e in estimates)
    repeated = any(e.interval is not None for e in estimates)
    head = ["ms/step", *["measured", "error"] * measured, "MB sent", "step", "run"]
    head += [*["range"] * repeated, *["time"] * timed, "note"]
    rows = [[*[""] * kinds, "", *head]]
    for e in estimates:
        check = ["", ""]
        if e.measured is not None:
            check = [f"{1e3 * e.measured:.4g}", f"{e.step / e.measured - 1:+.0%}"]
        rows.append([
            *[e.kind] * kinds, e.name, f"{1e3 * e.step:.4g}", *(check if measured else []),
            f"{e.wire_bytes / 1e6:.3g}", f"{e.speedup:.2f}×", f"{e.run_speedup:.2f}×",
            *[_range(e)] * repeated, *[format_hours(e.hours)] * timed, e.note,
        ])  # fmt: skip
    if not any(e.note for e in estimates):
        rows = [row[:-1] for row in rows]
    left = [0, *[1] * kinds, *[len(rows[0]) - 1] * (rows[0][-1] == "note")]
    return Table(rows, left, spare=("note", "MB sent", "error", "measured"))


def _range(e: SpeedupEstimate) -> str:
    ends = [f"{x:.2f}" for x in e.interval or ()]
    return "" if ends == ["1.00", "1.00"] else "–".join(ends)  # the dense method itself


def format_hours(hours: float | None) -> str:
    """Format a duration given in hours, with a suitable unit.

    >>> format_hours(30.0), format_hours(0.5), format_hours(0.03), format_hours(0.001)
    ('30 h', '30 min', '108 s', '3.6 s')
    """
    if hours is None:
        return ""
    for unit, seconds in (("h", 3600), ("min", 60)):
        if hours * 3600 >= 2 * seconds:
            return f"{hours * 3600 / seconds:.3g} {unit}"
    short = hours * 3600
    return f"{short:.0f} s" if short >= 10 else f"{short:.2g} s"


def format_seconds(seconds: float) -> str:
    """Format the duration of a step.

    >>> format_seconds(0.0123), format_seconds(6.04)
    ('12.3 ms', '6.04 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
