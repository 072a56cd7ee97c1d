"""`models_to_time`: the models whose steps are timed, as they are at the end of their runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.folder import list_checkpoints
from ...layers.names import unwrap
from ...lowrank.frobenius_decay import FrobeniusDecay
from ...measure import read_run
from ...switching.moments import AtStep
from ...switching.switch import Switch
from ..advise.timed_model import TimedModel
from ..rivals.pruning_by_name import build_pruning_change, is_pruning_method
from ..tasks import Recipe, Task
from ..train import RunSettings, build_optimizer
from ..train.find_width import find_width
from ..train.narrow_method import build_model
from ..train.worker_device import move_to_device
from .bench_method import bench_method
from .bench_runs import BenchRun, is_finished
from .bench_settings import BenchSettings
from .summary import read_rounds

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
        parsed = bench_method(method)
        recipe = parsed.recipe(default)
        torch.manual_seed(0)
        run = finished_run(method, settings, root)
        given = settings.run_settings(method, recipe)
        width = find_width(task, given) if parsed.method.narrow else None
        model = move_to_device(build_model(task, width), device)
        batch = next(
            task.batches(data, "train", recipe.batch, device=device, generator=torch.Generator().manual_seed(0),
                         worker=worker, world_size=workers)
        )  # fmt: skip
        models[method] = TimedModel(
            parsed.method,
            model,
            lambda net, recipe=recipe: build_optimizer(net, recipe),  # type: ignore[misc]
            _loss(task, batch, given),
            transform=to_final_model(method, task, recipe, data, run),
            clip=recipe.clip,
        )
    return models


def _needs_run(method: str) -> bool:
    """Whether the final model is known only from a run."""
    parsed = bench_method(method).method
    automatic = parsed.low_rank is not None and parsed.low_rank.automatic
    return automatic or is_pruning_method(parsed.model)


def finished_run(method: str, settings: BenchSettings, root: Path) -> Path | None:
    """The finished run with the lowest seed; for a pruning method, one that still has its checkpoints."""
    folders = (root / BenchRun(method, seed).name for seed in range(settings.seeds))
    pruned = is_pruning_method(bench_method(method).method.model)
    finished = (folder for folder in folders if is_finished(folder))
    return next((f for f in finished if not pruned or list_checkpoints(f / "checkpoints")), None)


def to_final_model(method: str, task: Task, recipe: Recipe, data: Any, run: Path | None) -> Transform | None:
    """The change from the initial to the final model of a method, or to the low-rank one that it trained; None if the model is not changed."""
    name = bench_method(method).method.model
    if is_pruning_method(name):
        assert run is not None
        lengths = {"epochs": recipe.epochs, "steps_per_epoch": task.steps(data, recipe.batch)}
        checkpoints = run / "checkpoints"

        def prune(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            build_pruning_change(name, model, optimizer, **lengths).restore(checkpoints)

        return prune
    low_rank_method = bench_method(method).method.low_rank
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
