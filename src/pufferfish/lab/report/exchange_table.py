"""`exchange_table`: how often methods with local steps exchange, what they send, and how much of the time they compute."""

import statistics

from .comparison import Comparison, MethodRuns
from .formatting import format_bytes, format_number
from .headline import median_cell
from .tables import Cell, Table

COLUMNS = ("method", "utilisation", "bytes/update", "bytes/round", "largest exchange", "peak rate")
_NOTES = (
    "Utilisation: computing time over the time of an update. Bytes are those that one worker sends. A round is the h updates in "
    "which local steps average the whole model once. Peak rate: rate that the largest exchange needs to be done within the "
    "updates until it is applied, or within one.",
)


def exchange_table(comparison: Comparison) -> Table | None:
    """Utilisation, bytes and peak rate of all methods; None if none has local steps."""
    if not any(method.results("bytes_a_round") for method in comparison.methods):
        return None
    rows = [
        [
            Cell(method.name),
            utilisation_cell(method),
            *(median_cell(method.results(f"{key}"), format_bytes) for key in ("bytes_a_step", "bytes_a_round", "peak_bytes")),
            peak_rate_cell(method),
        ]
        for method in comparison.methods
    ]  # fmt: skip
    return Table("Exchange", COLUMNS, rows, _NOTES)


def utilisation_cell(method: MethodRuns) -> Cell:
    """Computing time over wall time, measured or predicted."""
    value = utilisation(method)
    if value is None:
        return Cell()
    return Cell(f"{100 * value:.1f} %" + " (predicted)" * (not method.results("utilisation")), value)


def peak_rate_cell(method: MethodRuns) -> Cell:
    """Rate of the largest exchange."""
    peak, updates = method.results("peak_bytes"), method.results("exchange_updates")
    share, seconds = (
        utilisation(method),
        method.results("seconds_a_step") or method.predictions("seconds_a_step"),
    )
    if not peak or not seconds or not share or not (sent := statistics.median(peak.values())):
        return Cell()
    compute = share * statistics.median(seconds.values())
    rate = 8 * sent / (statistics.median(updates.values() or [1]) * compute)
    return Cell(f"{format_number(rate / 1e6)} Mbit/s", rate)


def utilisation(method: MethodRuns) -> float | None:
    """Computing time over the time of an update; None if it is not known."""
    values = method.results("utilisation") or method.predictions("utilisation")
    return statistics.median(values.values()) if values else None
