"""What the timed rounds say: `summary.json`, which the report lays over the runs."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...measure import read
from ..advise.timing_rounds import Round, quartiles, ratios
from ..report.bench_folder import CEILING, SUMMARY
from .bench_settings import ALWAYS, read_json, write_json
from .learning_rates import Rate


def rounds_of(root: Path) -> list[dict[str, Any]]:
    """All rounds that were timed, in their order."""
    paths = sorted(
        (root / "timing").glob("round-*.json"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)]
    )
    return [read_json(path, "it was there a moment ago") for path in paths]


def summarise(root: Path, methods: Sequence[str], rates: Mapping[str, Rate]) -> None:
    """Write what the rounds and the tuning say, for each method.

    Under "results" and "predicted" it has what a run.json has there: medians over the rounds, and under "rounds" the
    quartiles, of seconds and of each round's ratio to the references. Steps on a link that stood in for another are
    not shown as measured.
    """
    files = rounds_of(root)
    rounds = [file["methods"] for file in files]
    found: dict[str, Any] = {method: {"results": {}, "predicted": {}} for method in methods}
    for method in dict.fromkeys(name for r in rounds for name in r):
        here = [file for file in files if method in file["methods"]]
        results = _results(rounds, method)
        elsewhere = here[-1]["elsewhere"]
        if elsewhere:
            results |= dict.fromkeys(("seconds_a_step", "alone", "parts", "rounds"))
            results["notes"] = [
                f"Steps are predicted for {elsewhere}, which cannot be emulated here: the runs went over the plain "
                "loopback, and how long they took would say nothing."
            ]
        said = here[-1]["predicted"].get(method, {})
        found[method] = {"results": results, "predicted": _predicted(said)}
    if any("alone" in r[ALWAYS[0]] for r in rounds):
        found[CEILING] = _ceiling(rounds, found[ALWAYS[0]])
    elif computing := _simulated(root):
        found[CEILING] = {"results": {}, "predicted": {"seconds_a_step": statistics.median(computing)}}
    for method, rate in rates.items():
        if rate.edge:
            found[method]["results"].setdefault("notes", []).append(at_the_edge(method, rate))
    write_json(root / SUMMARY, {"methods": found})


def at_the_edge(method: str, rate: Rate) -> str:
    """What has to be said of a rate at the end of the grid."""
    return (
        f"{method}: its best learning rate, {rate.lr:.3g}, is the {rate.edge} of {len(rate.scores)} that were tried; "
        "a better one may lie beyond."
    )


def _results(rounds: Sequence[Round], method: str) -> dict[str, Any]:
    seen = [r[method] for r in rounds if method in r]

    def median(key: str) -> float:
        return float(statistics.median(x[key] for x in seen))

    timed = [name for name in ALWAYS if name != method and any(name in r for r in rounds)]
    against = {name: quartiles(ratios(rounds, method, name)) for name in timed}
    return {
        "seconds_a_step": median("seconds"),
        "bytes_a_step": median("bytes"),
        "messages_a_step": median("messages"),
        **({"alone": median("alone")} if "alone" in seen[0] else {}),
        "parts": {part: statistics.median(x["parts"][part] for x in seen) for part in seen[0]["parts"]},
        "rounds": {
            "count": len(seen),
            "seconds": quartiles([x["seconds"] for x in seen]),
            "against": against,
        },
    }


def _predicted(said: Mapping[str, float]) -> dict[str, Any]:
    parts = {part: seconds for part, seconds in said.items() if part != "seconds"}
    return {"seconds_a_step": said["seconds"], "parts": parts} if said else {}


def _simulated(root: Path) -> list[float]:
    """What the cost model says of a dense step without its exchange, where workers are simulated."""
    runs = [read(path.parent) for path in sorted((root / "runs" / ALWAYS[0]).glob("*/run.json"))]
    said = [
        (run.metrics.get("predicted/step"), run.metrics.get("predicted/exchange"))
        for run in runs
        if run.workers > 1
    ]
    return [step[-1][2] - exchange[-1][2] for step, exchange in said if step and exchange]


def _ceiling(rounds: Sequence[Round], dense: Mapping[str, Any]) -> dict[str, Any]:
    """As if the dense model's step alone were a method."""
    alone = [r[ALWAYS[0]]["alone"] for r in rounds]
    nothing = {"bytes": 0, "messages": 0, "parts": {}}
    with_it: list[Round] = [
        r | {CEILING: {"seconds": a, "alone": a, **nothing}} for r, a in zip(rounds, alone, strict=True)
    ]
    results = _results(with_it, CEILING)
    if dense["results"]["seconds_a_step"] is not None:
        return {"results": results, "predicted": {}}
    # It is the same on any link, but beside predicted steps it counts as one of them.
    results |= dict.fromkeys(("seconds_a_step", "rounds"))
    return {"results": results, "predicted": {"seconds_a_step": statistics.median(alone)}}
