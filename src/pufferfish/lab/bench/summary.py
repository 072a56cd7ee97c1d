"""`write_summary`: the results of the timed rounds as `summary.json`, which the report adds to the runs."""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...measure import read_run
from ...measure.cost_model import COMPUTE_PARTS
from ...planning.json_file import read_json
from ..advise.timing_rounds import Round, quartiles, speedups
from ..report.bench_folder import NO_EXCHANGE, SUMMARY
from .bench_settings import REFERENCES, write_json
from .tuned_rate import TunedRate


def read_rounds(root: Path) -> list[dict[str, Any]]:
    """The files of all timed rounds, in order."""
    paths = {tuple(map(int, re.findall(r"\d+", p.name))): p for p in (root / "timing").glob("round-*.json")}
    return [read_json(paths[n]) for n in sorted(paths)]


def write_summary(root: Path, methods: Sequence[str], rates: Mapping[str, TunedRate]) -> None:
    """Write the results of the timed rounds and of the tuning, for each method.

    "results" and "predicted" have the same keys as in run.json: medians over the rounds, and under "rounds" the
    quartiles of the step time and of the speedups over the references. If the requested link could not be emulated,
    measured step times are left out.
    """
    files = read_rounds(root)
    rounds = [file["methods"] for file in files]
    summary: dict[str, Any] = {method: {"results": {}, "predicted": {}} for method in methods}
    for method in dict.fromkeys(name for r in rounds for name in r):
        last = [file for file in files if method in file["methods"]][-1]
        results = _results(rounds, method)
        if target_link := last["target_link"]:
            results |= dict.fromkeys(("seconds_a_step", "compute_seconds", "utilisation", "parts", "rounds"))
            results["notes"] = [
                f"Steps are predicted for {target_link}, which cannot be emulated here. The runs used the unshaped "
                "loopback, so their times are not shown."
            ]
        predicted = {}
        if prediction := last["predicted"].get(method):
            parts = {part: value for part, value in prediction.items() if part != "seconds"}
            computing = sum(parts.get(part, 0.0) for part in COMPUTE_PARTS)
            share = computing / prediction["seconds"]
            predicted = {"seconds_a_step": prediction["seconds"], "utilisation": share, "parts": parts}
        summary[method] = {"results": results, "predicted": predicted}
    dense = REFERENCES[0]
    if any("compute_seconds" in r[dense] for r in rounds):
        summary[NO_EXCHANGE] = _no_exchange(rounds, summary[dense])
    elif seconds := _simulated_compute(root):
        summary[NO_EXCHANGE] = {"results": {}, "predicted": {"seconds_a_step": statistics.median(seconds)}}
    for method, rate in rates.items():
        if rate.edge:
            summary[method]["results"].setdefault("notes", []).append(
                f"{method}: its best learning rate, {rate.lr:.3g}, is the {rate.edge} of the {len(rate.scores)} that were "
                "tried; a better one may lie beyond."
            )
    write_json(root / SUMMARY, {"methods": summary})


def _results(rounds: Sequence[Round], method: str) -> dict[str, Any]:
    timings = [r[method] for r in rounds if method in r]

    def median(key: str) -> float:
        return float(statistics.median(timing[key] for timing in timings))

    references = [name for name in REFERENCES if name != method and any(name in r for r in rounds)]
    return {
        "seconds_a_step": median("seconds"),
        "bytes_a_step": median("bytes"),
        "messages_a_step": median("messages"),
        **(_compute(timings) if "compute_seconds" in timings[0] else {}),
        "parts": {part: statistics.median(t["parts"][part] for t in timings) for part in timings[0]["parts"]},
        "rounds": {
            "count": len(timings),
            "seconds": quartiles([timing["seconds"] for timing in timings]),
            "against": {name: quartiles(speedups(rounds, method, name)) for name in references},
        },
    }


def _compute(timings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a step without the exchange, and the share that computing has of a step."""
    shares = [min(1.0, timing["compute_seconds"] / timing["seconds"]) for timing in timings]
    seconds = statistics.median(timing["compute_seconds"] for timing in timings)
    return {"compute_seconds": seconds, "utilisation": statistics.median(shares)}


def _simulated_compute(root: Path) -> list[float]:
    """Predicted seconds of a dense step without its exchange, for simulated workers."""
    runs = [read_run(path.parent) for path in sorted((root / "runs" / REFERENCES[0]).glob("*/run.json"))]
    metrics = [run.metrics for run in runs if run.workers > 1]
    curves = [(m.get("predicted/step"), m.get("predicted/exchange")) for m in metrics]
    return [step[-1][2] - exchange[-1][2] for step, exchange in curves if step and exchange]


def _no_exchange(rounds: Sequence[Round], dense: Mapping[str, Any]) -> dict[str, Any]:
    """Results of a dense step without the exchange, as if it were a method."""
    seconds = [r[REFERENCES[0]]["compute_seconds"] for r in rounds]
    no_traffic = {"bytes": 0, "messages": 0, "parts": {}}
    steps = [{NO_EXCHANGE: {"seconds": s, "compute_seconds": s, **no_traffic}} for s in seconds]
    results = _results([r | step for r, step in zip(rounds, steps, strict=True)], NO_EXCHANGE)
    if dense["results"]["seconds_a_step"] is not None:
        return {"results": results, "predicted": {}}
    # It does not depend on the link, but is listed with the predictions if the other steps are predicted.
    results |= dict.fromkeys(("seconds_a_step", "rounds"))
    return {"results": results, "predicted": {"seconds_a_step": statistics.median(seconds)}}
