"""The timed models of a bench, predictions of their steps, and the summary of the rounds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.folder import list_checkpoints
from ...layers.names import trainable_parameters, unwrap
from ...lowrank.frobenius_decay import FrobeniusDecay
from ...measure import CostModel, Work, probe, read_run
from ...measure.breakdown import PARTS
from ...measure.cost_model import (
    COMPUTE_PARTS,
    built_buckets,
    probe_bytes,
    with_buckets,
    with_local_exchange,
)
from ...planning.json_file import read_json
from ...switching.moments import AtStep
from ...switching.switch import Switch
from ..advise.advisor import measured_work, with_messages
from ..method_name import training_method
from ..network import LinkShape
from ..report.comparison import NO_EXCHANGE, SUMMARY
from ..rivals.pruning import build_pruning_change
from ..tasks import Recipe, Task
from ..train import RunSettings, build_optimizer
from ..train.optimizers import SAM
from ..train.settings import build_model, find_width
from ..train.timing import Round, TimedModel, quartiles, speedups
from ..train.workers import move_to_device
from .bench_settings import REFERENCES, BenchRun, BenchSettings, TunedRate, is_finished, write_json

Transform = Callable[[nn.Module, torch.optim.Optimizer], object]


def untimed_methods(settings: BenchSettings, root: Path) -> list[str]:
    """The methods with fewer timed rounds than requested whose final model is known."""
    rounds = read_rounds(root)
    missing = [m for m in settings.methods if sum(m in r["methods"] for r in rounds) < settings.rounds]
    return [m for m in missing if not _needs_run(m) or finished_run(m, settings, root)]


def models_to_time(
    methods: Sequence[str],
    settings: BenchSettings,
    root: Path,
    data: Any,
    *,
    worker: int,
    workers: int,
    device: torch.device,
) -> dict[str, TimedModel]:
    """Build a model for each method, with one batch of the recipe. Call it on all workers."""
    task, default = settings.resolve()
    models = {}
    for method in methods:
        parsed = training_method(method)
        recipe = parsed.recipe(default)
        torch.manual_seed(0)
        run = finished_run(method, settings, root)
        given = settings.run_settings(method, recipe)
        width = find_width(task, given) if parsed.narrow else None
        model = move_to_device(build_model(task, width), device)
        batch = next(
            task.batches(data, "train", recipe.batch, device=device, generator=torch.Generator().manual_seed(0),
                         worker=worker, world_size=workers)
        )  # fmt: skip
        models[method] = TimedModel(
            parsed,
            model,
            lambda net, recipe=recipe: build_optimizer(net, recipe),  # type: ignore[misc]
            _loss(task, batch, given),
            transform=to_final_model(method, task, recipe, data, run),
            clip=recipe.clip,
        )
    return models


def _needs_run(method: str) -> bool:
    """Whether the final model is known only from a run."""
    parsed = training_method(method)
    automatic = parsed.low_rank is not None and parsed.low_rank.automatic
    return automatic or parsed.pruning is not None


def finished_run(method: str, settings: BenchSettings, root: Path) -> Path | None:
    """The finished run with the lowest seed; for a pruning method, one that still has its checkpoints."""
    folders = (root / BenchRun(method, seed).name for seed in range(settings.seeds))
    pruned = training_method(method).pruning is not None
    finished = (folder for folder in folders if is_finished(folder))
    return next((f for f in finished if not pruned or list_checkpoints(f / "checkpoints")), None)


def to_final_model(method: str, task: Task, recipe: Recipe, data: Any, run: Path | None) -> Transform | None:
    """The change from the initial to the final model of a method, or to the low-rank one that it trained; None if the model is not changed."""
    pruning = training_method(method).pruning
    if pruning is not None:
        assert run is not None
        lengths = {"epochs": recipe.epochs, "steps_per_epoch": task.steps(data, recipe.batch)}
        checkpoints = run / "checkpoints"

        def prune(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            build_pruning_change(pruning, model, optimizer, **lengths).restore(checkpoints)

        return prune
    low_rank_method = training_method(method).low_rank
    if low_rank_method is None:
        return None

    def switch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        low_rank = low_rank_method.make_plan(unwrap(model), recipe, task.keep)
        if run is not None:
            trained = read_run(run)
            ranks = {layer["name"]: layer["rank"] for layer in trained.layers if layer["rank"] is not None}
            low_rank = low_rank.replace(
                e.with_rank(ranks[e.name]) if e.name in ranks else e.keep_dense("dense in its run")
                for e in low_rank
            )
            shared = trained.results.get("shared_inputs", ())
            low_rank = replace(low_rank, shared_inputs=tuple(map(tuple, shared)))
        if low_rank_method.frobenius:
            FrobeniusDecay(model, optimizer, low_rank_method.frobenius)
        Switch(low_rank, when=AtStep(0)).step(model, optimizer, step=0)

    return switch


def _loss(task: Task, batch: Any, settings: RunSettings) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        with settings.autocast:
            return task.loss(model, batch, settings.recipe)

    return loss


def predictions(
    models: Mapping[str, TimedModel], target_link: LinkShape | None = None
) -> dict[str, dict[str, float]]:
    """Predict the seconds of a step and of its parts, by method. Call it on all workers, after a warm-up.

    The compute of each model is timed without the exchange, its compression is timed in a dry run, and the link is
    probed, or `target_link` is used. Nothing is fitted to steps with an exchange.
    """
    works = {name: _work(model) for name, model in models.items()}
    first = next(iter(models.values()))
    link = probe(device=first.device, largest=probe_bytes(first.inner))
    if target_link is not None:
        link = link.limited_to(bandwidth=1e6 * target_link.mbit, latency=1e-3 * target_link.delay_ms)
    costs = CostModel(link=link)
    predicted = {name: costs.predict(work) for name, work in works.items()}
    return {
        name: {"seconds": p.step} | {part: getattr(p, part) for part in (*PARTS, "hidden")}
        for name, p in predicted.items()
    }


def _work(model: TimedModel) -> Work:
    """Compute and messages of a step; without compression, the messages are the buckets that DDP has built."""
    work = measured_work(model)
    if isinstance(model.optimizer, SAM):  # only the second of its two passes overlaps with the exchange
        work = replace(work, forward=work.forward + work.backward / 2, backward=work.backward / 2)
    if (local := model.method.local) is not None:
        parameters = trainable_parameters(model.inner)
        return with_local_exchange(work, local.schedule, local.settings, parameters, model.size)
    work = with_messages(work, model.inner, model.method.compress, model.size)
    if model.hook is not None:
        return work
    assert model.ddp is not None
    return with_buckets(work, built_buckets(model.ddp))


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
