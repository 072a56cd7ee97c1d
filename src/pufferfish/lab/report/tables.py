"""The tables of a report: the same on the page and in the text formats."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...measure import Run
from ...measure.breakdown import PARTS
from .comparison import Comparison, MethodRuns, as_text, is_number, late_median, recorded_layers
from .formatting import format_bytes, format_seconds

#: Parts of a layer's record that have a column of their own.
_LAYER = ("name", "shape", "full_rank", "rank")
BAND = 0.2  # largest relative error of a prediction that counts as right


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


def breakdown(comparison: Comparison) -> Table | None:
    """Seconds of each part of a step; None if no run recorded them."""
    rows = []
    for method in comparison.methods:
        parts = step_parts(method)
        if parts:
            total = sum(parts[name] for name in PARTS if name in parts)
            seconds = [*(parts.get(name) for name in (*PARTS, "hidden")), total]
            cells = [Cell() if value is None else Cell(format_seconds(value), value) for value in seconds]
            rows.append([Cell(method.name), *cells])
    notes = (
        "Median over the timed rounds of a bench; otherwise the median over the second half of each run, averaged over "
        "seeds. “exchange” is the time that a step waits for communication; communication hidden behind the backward pass is "
        "listed separately and not part of the sum. All times are those of the first worker. A step of a bench ends with its "
        "slowest worker, so it can take longer than the sum.",
    )
    columns = ["method", *PARTS, "exchange, hidden", "sum"]
    return Table("Breakdown of the step time", columns, rows, notes) if rows else None


def step_parts(method: MethodRuns) -> dict[str, float]:
    """Seconds of each part of a step, and of the exchange hidden behind the backward pass."""
    timed = next((parts for run in method.runs if (parts := run.results.get("parts"))), None)
    if timed is not None:  # from the rounds of a bench
        return {name: timed[name] for name in (*PARTS, "hidden") if name in timed}
    parts = {}
    for name in (*PARTS, "hidden"):
        values = [value for run in method.runs if (value := late_median(run, f"time/{name}")) is not None]
        if values:
            parts[name] = statistics.fmean(values)
    return parts


def ranks(comparison: Comparison) -> Table | None:
    """The rank of each layer under each method with low-rank layers, and what else is recorded of it, for the first seed."""
    by_method = {
        method.name: {layer["name"]: layer for layer in recorded_layers(method.runs[0])}
        for method in comparison.methods
        if is_low_rank(method)
    }
    names = dict.fromkeys(name for layers in by_method.values() for name in layers)
    found = ((k, m) for m, layers in by_method.items() for layer in layers.values() for k in layer)
    more = [pair for pair in dict.fromkeys(found) if pair[0] not in _LAYER]
    rows = []
    for name in names:
        layer = next(layers[name] for layers in by_method.values() if name in layers)
        row = [Cell(name), Cell("×".join(map(str, layer.get("shape") or ())))]
        row.append(Cell(str(layer.get("full_rank", "–")), layer.get("full_rank")))
        for layers in by_method.values():
            rank = layers.get(name, {}).get("rank")
            row.append(Cell(str(rank), rank) if rank is not None else Cell("full"))
        for key, method in more:
            value = by_method[method].get(name, {}).get(key)
            row.append(Cell() if value is None else Cell(as_text(value), value if is_number(value) else None))
        rows.append(row)
    columns = ["layer", "shape", "full rank", *by_method, *(f"{method}: {key}" for key, method in more)]
    return Table("Rank of each layer", columns, rows) if rows else None


def is_low_rank(method: MethodRuns) -> bool:
    return any(layer.get("rank") is not None for layer in recorded_layers(method.runs[0]))


def predicted(comparison: Comparison) -> Table | None:
    """Predictions of the cost model beside the measured values."""
    kinds: dict[str, Callable[[float], str]] = {
        "seconds_a_step": format_seconds, "bytes_a_step": format_bytes, "peak_memory": format_bytes
    }  # fmt: skip
    rows = []
    for method in comparison.methods:
        for key, show in kinds.items():
            predictions, results = method.predictions(key), method.results(key)
            seeds = sorted(predictions.keys() & results.keys())
            if seeds:
                expected, measured = (statistics.median(x[s] for s in seeds) for x in (predictions, results))
                error = expected / measured - 1 if measured else float("inf")
                text = f"{100 * error:+.0f} %".replace("-", "−") + ", beyond 20 %" * (abs(error) > BAND)
                rows.append([
                    Cell(method.name), Cell(label(key)), Cell(show(expected), expected), Cell(show(measured), measured),
                    Cell(text, error, tone="bad" if abs(error) > BAND else ""),
                ])  # fmt: skip
    columns = ["method", "quantity", "predicted", "measured", "error"]
    return Table("Predicted and measured", columns, rows) if rows else None


def label(key: str) -> str:
    """The name of a result as a column heading.

    >>> label("bytes_a_step"), label("peak_memory")
    ('bytes per step', 'peak memory')
    """
    return key.replace("_a_", "_per_").replace("_", " ")


def all_results(comparison: Comparison) -> Table | None:
    """Everything that the runs recorded as a result, a prediction, or as a metric with a single value; by method, for all seeds."""
    by_method = {method.name: [_recorded(run) for run in method.runs] for method in comparison.methods}
    keys = dict.fromkeys(key for runs in by_method.values() for run in runs for key in run)
    rows = []
    for key in keys:
        shown = (
            ", ".join(dict.fromkeys(run[key] for run in runs if key in run)) for runs in by_method.values()
        )
        rows.append([Cell(key), *(Cell(text or "–") for text in shown)])
    note = "A value for each seed, or one if they are equal."
    return Table("All results", ["result", *by_method], rows, [note]) if rows else None


def _recorded(run: Run) -> dict[str, str]:
    single = {name: rows[0][2] for name, rows in run.metrics.items() if len(rows) == 1}
    return flat(run.results) | flat(run.predicted, "predicted: ") | flat(single, "metric: ")


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


def settings(comparison: Comparison) -> Table | None:
    """All settings, those that differ between methods first."""
    by_method = {method.name: [flat(run.settings) for run in method.runs] for method in comparison.methods}
    keys = dict.fromkeys(key for runs in by_method.values() for run in runs for key in run)
    rows = []
    for key in keys:
        shown = ([run[key] for run in runs if key in run] or ["–"] for runs in by_method.values())
        values = [", ".join(dict.fromkeys(each)) for each in shown]
        rows.append((len(set(values)) == 1, [Cell(key), *map(Cell, values)]))
    rows.sort(key=lambda row: row[0])
    return Table("All settings", ["setting", *by_method], [row for _, row in rows]) if rows else None


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
