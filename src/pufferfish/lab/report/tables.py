"""What the runs say, as tables: the same in the page and in the texts."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...measure.breakdown import PARTS
from .curves import charted, mean_curve, typical
from .groups import Comparison, Group, is_number, layers_of, short
from .numbers import nbytes, seconds

BAND = 0.2  # how far from the measured time a prediction may be


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number behind it for sorting and for CSV."""

    text: str = "–"
    value: float | None = None
    half: float | None = None  # of the 95 % interval
    tone: str = ""  # "good", "bad": also said in the text
    share: float | None = None  # of the largest in its column, drawn as a bar


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default=())


def breakdown(comparison: Comparison) -> Table | None:
    """Seconds of each part of a step; None where no run has them."""
    rows = []
    for group in comparison.groups:
        parts = group_parts(group)
        if parts:
            exposed = sum(parts[name] for name in PARTS if name in parts)
            cells = [
                Cell(seconds(parts[name]), parts[name]) if name in parts else Cell()
                for name in (*PARTS, "hidden")
            ]
            rows.append([Cell(group.name), *cells, Cell(seconds(exposed), exposed)])
    notes = (
        "Median over a bench's rounds, else over the second half of each run and then the mean over seeds. "
        "Exchange is what the step waits for; what hid behind the backward pass is apart and not in the sum. All are of the "
        "first worker; a bench's step ends with the last one, and may be longer than the sum.",
    )
    columns = ["method", *PARTS, "exchange, hidden", "sum"]
    return Table("Where a step's time goes", columns, rows, notes) if rows else None


def group_parts(group: Group) -> dict[str, float]:
    """Seconds of each part of a step, and of the exchange hidden behind backward."""
    timed = next((parts for run in group.runs if (parts := run.results.get("parts"))), None)
    if timed is not None:  # by a bench, in rounds
        return {name: timed[name] for name in (*PARTS, "hidden") if name in timed}
    found = {}
    for name in (*PARTS, "hidden"):
        values = [value for run in group.runs if (value := typical(run, f"time/{name}")) is not None]
        if values:
            found[name] = statistics.fmean(values)
    return found


def ranks(comparison: Comparison) -> Table | None:
    """Every layer's rank under every method that has low-rank layers; of the first seed."""
    methods = [(group, layers_of(group.runs[0])) for group in comparison.groups if low_rank(group)]
    names = list(dict.fromkeys(str(layer["name"]) for _, layers in methods for layer in layers))
    if not names:
        return None
    found = {group.name: {str(layer["name"]): layer for layer in layers} for group, layers in methods}
    rows = []
    for name in names:
        layer = next(layers[name] for layers in found.values() if name in layers)
        row = [Cell(name), Cell("×".join(map(str, layer.get("shape") or ())))]
        row.append(Cell(str(layer.get("full_rank", "–")), layer.get("full_rank")))
        for layers in found.values():
            rank = layers.get(name, {}).get("rank")
            row.append(Cell(str(rank), rank) if rank is not None else Cell("full"))
        rows.append(row)
    return Table("Rank of every layer", ["layer", "shape", "full rank", *found], rows)


def low_rank(group: Group) -> bool:
    return any(layer.get("rank") is not None for layer in layers_of(group.runs[0]))


def predicted(comparison: Comparison) -> Table | None:
    """What the cost model said, beside what was measured."""
    kinds: dict[str, Callable[[float], str]] = {
        "seconds_a_step": seconds, "bytes_a_step": nbytes, "peak_memory": nbytes
    }  # fmt: skip
    rows = []
    for group in comparison.groups:
        for key, show in kinds.items():
            said, got = group.predictions(key), group.results(key)
            both = sorted(said.keys() & got.keys())
            if both:
                a, b = (statistics.median(x[seed] for seed in both) for x in (said, got))
                error = a / b - 1 if b else float("inf")
                text = f"{100 * error:+.0f} %".replace("-", "−") + (
                    ", beyond 20 %" if abs(error) > BAND else ""
                )
                rows.append([
                    Cell(group.name), Cell(key.replace("_", " ")), Cell(show(a), a), Cell(show(b), b),
                    Cell(text, error, tone="bad" if abs(error) > BAND else ""),
                ])  # fmt: skip
    return (
        Table("Predicted and measured", ["method", "of", "predicted", "measured", "error"], rows)
        if rows
        else None
    )


def progress(comparison: Comparison) -> Table | None:
    """The curves: means over seeds, and the lowest and highest seed."""
    name, label, measure = charted(comparison)
    rows = []
    for group in comparison.groups:
        for over in ("seconds", "bytes"):
            for x, *values in mean_curve(group, name, over, measure.scale):
                cells = [Cell(f"{value:g}", value) for value in (x, *values)]
                rows.append([Cell(group.name), Cell(over), *cells])
    columns = ["method", "over", "at", label, "lowest seed", "highest seed"]
    return Table("Progress", columns, rows) if rows else None


def setup(comparison: Comparison) -> Table:
    """What ran on what: a line for each fact, with all values that the runs have."""
    facts: dict[str, list[str]] = {}

    def add(name: str, value: object) -> None:
        if value not in (None, "", {}):
            facts.setdefault(name, []).append(short(value))

    for run in comparison.runs:
        add("task", run.settings.get("task"))
        add("workers", run.workers)
        add("hosts", run.hosts)
        for name in ("gpu", "cpu", "cores", "threads", "host"):
            add(name, run.hardware.get(name))
        add("link asked for", (run.link or {}).get("asked"))
        for name, value in run.versions.items():
            add(name, value)
        add("seeds", run.seed)
        add("started", (run.started or "")[:16].replace("T", " "))
    links = [run.link or {} for run in comparison.runs]
    for name, key, show in (
        ("link got", "got_mbit", lambda x: f"{x:.4g} Mbit/s"),
        ("latency", "latency_ms", lambda x: seconds(x / 1e3)),
    ):
        got = [float(link[key]) for link in links if is_number(link.get(key))]
        if got:
            facts[name] = [" to ".join(dict.fromkeys(map(show, (min(got), max(got)))))]
    if len({*facts.get("seeds", ())}) == 1:
        facts = {"seed" if name == "seeds" else name: values for name, values in facts.items()}
    rows = [[Cell(name), Cell(_several(values))] for name, values in facts.items()]
    return Table("What ran on what", ["what", "value"], rows)


def summary(comparison: Comparison, with_title: bool = True) -> str:
    """The most needed of it in one line."""
    facts = {first.text: value.text for first, value in setup(comparison).rows}
    if "commit" in facts:  # twelve digits tell it from others
        facts["commit"] = re.sub(r"([0-9a-f]{12})[0-9a-f]+", r"\1", facts["commit"])
    wanted = ("link got", "latency", "torch", "commit", "seed", "seeds")
    named = [f"{name} {facts[name]}" for name in wanted if name in facts]
    return " · ".join([comparison.title] * with_title + named)


def settings(comparison: Comparison) -> Table | None:
    """All settings; those in which the methods differ first."""
    found = {group.name: [flat(run.settings) for run in group.runs] for group in comparison.groups}
    keys = dict.fromkeys(key for runs in found.values() for run in runs for key in run)
    rows = []
    for key in keys:
        shown = [_several([run[key] for run in runs if key in run] or ["–"]) for runs in found.values()]
        rows.append((len(set(shown)) == 1, [Cell(key), *map(Cell, shown)]))
    rows.sort(key=lambda row: row[0])
    return Table("All settings", ["setting", *found], [row for _, row in rows]) if rows else None


def flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested settings as one level of text.

    >>> flat({"lr": 0.1, "data": {"crop": True}})
    {'lr': '0.1', 'data.crop': 'true'}
    """
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = short(value)
    return found


def _several(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(values))
