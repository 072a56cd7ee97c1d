"""`--compile`: compiled runs equal eager ones, and every model is compiled as often as needed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from processes import in_processes
from pufferfish.lab.method_name import training_method
from pufferfish.lab.tasks import find_task
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.step import StepRunner, build_components
from pufferfish.measure import read_run

TASK = "digits:mlp,width=8"


def close(folder: Path, tolerance: float, *names: str) -> None:
    """The runs in the subfolders `eager` and `compile` have the same rows."""
    runs = [read_run(folder / name) for name in ("eager", "compile")]
    for name in ("loss", "valid/loss", *names):
        rows = [[(step, value) for _, step, value in run.metrics[name]] for run in runs]
        assert [step for step, _ in rows[0]] == [step for step, _ in rows[1]]
        assert [x for _, x in rows[0]] == pytest.approx([x for _, x in rows[1]], rel=tolerance)
    assert runs[0].results["parameters"] == runs[1].results["parameters"]
    assert [run.settings["mode"] for run in runs] == ["eager", "compile"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("simulate", [None, 2])
def test_a_compiled_run_equals_an_eager_one(
    simulate: int | None, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across the switch; and its folder is resumed in the same mode only."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    task = find_task(TASK)
    recipe = replace(task.recipe("short"), epochs=2, switch_at=1, clip=1.0)
    method = training_method("pufferfish")
    for name in ("eager", "compile"):
        given = RunSettings(
            method, recipe, tmp_path / name, compile=name == "compile", quiet=True, accumulate=2, simulate=simulate
        )  # fmt: skip
        assert train(task, given) is not None
    close(tmp_path, 1e-4)
    compiled = read_run(tmp_path / "compile")
    assert compiled.results["low_rank_layers"] > 0
    assert simulate or {"time/forward", "time/backward"} <= compiled.metrics.keys()
    with pytest.raises(ValueError, match="it holds a run with mode compile, not eager"):
        train(task, replace(given, compile=False))


def train_in(rank: int, size: int, folder: str, compiled: bool) -> None:
    task = find_task(TASK)
    recipe = replace(task.recipe("short"), epochs=2, switch_at=1, clip=1.0)
    method = training_method("pufferfish+powersgd(2)")
    given = RunSettings(method, recipe, Path(folder), compile=compiled, quiet=True, accumulate=2)
    assert train(task, given) is not None


@pytest.mark.slow
def test_ddp_is_compiled(tmp_path: Path) -> None:
    """With a compression hook, accumulation, clipping and the switch."""
    for name in ("eager", "compile"):
        in_processes(train_in, 2, str(tmp_path / name), name == "compile")
    close(tmp_path, 1e-3, "bytes")


def test_every_run_of_a_process_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although torch compiles a limited number of models of one class, which is 2 here."""
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(folder.name)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    folders = [tmp_path / str(width) for width in (4, 5, 6, 7)]
    # Not by monkeypatch, whose undo deletes the setting: torch's configuration does not restore its default then.
    with torch._dynamo.config.patch(recompile_limit=2):
        for folder in folders:
            task = find_task(f"digits:mlp,width={folder.name}")
            recipe = replace(task.recipe("short"), epochs=1)
            train(task, RunSettings(training_method("dense"), recipe, folder, compile=True, quiet=True))
    assert set(compiled) == {folder.name for folder in folders}


def test_a_model_is_compiled_once_before_and_once_after_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a whole: the switch looks for layers that share an input before."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    task = find_task("text:d=64,layers=2,heads=2,context=8")
    tiny.text(tmp_path)
    recipe = replace(task.recipe("short"), epochs=4, switch_at=2, batch=4)
    given = RunSettings(
        training_method("pufferfish"), recipe, tmp_path / "run", data=tmp_path, compile=True, quiet=True
    )
    results = train(task, given)
    assert results is not None
    assert len(graphs) == 2
    assert results["shared_inputs"] == [[f"blocks.1.attention.{name}" for name in "qkv"]]


# Large enough to become low-rank.
TEXT = "text:d=64,layers=2,heads=2,context=8,dropout=0"
MLP = "digits:mlp,width=16"
CASES: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "sgd": (MLP, "pufferfish", {}, 1e-3),
    "accumulate": (MLP, "pufferfish", {"accumulate": 2}, 1e-3),
    "simulated": (MLP, "pufferfish+powersgd(2)", {"simulate": 4}, 1e-2),
    "simulated local steps": (MLP, "pufferfish+streaming(4,fragments=2)", {"simulate": 2}, 1e-3),
    "carried state": ("wikitext2:d=64,bptt=5,dropout=0", "pufferfish", {}, 1e-2),
    "early bird": ("digits:width=16", "early-bird(0.5)", {}, 0.1),
    "adamw, clip": (TEXT, "pufferfish", {}, 1e-2),
    "adamw, clip, bf16": (TEXT, "pufferfish", {"precision": "bf16"}, 0.05),
    "muon, bf16": (TEXT, "pufferfish", {"precision": "bf16", "recipe": {"optimizer": "muon"}}, 0.05),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can, in CUDA graphs; also across a change of the model, after which it is compiled again."""
    # Otherwise cuDNN's sums differ from run to run, and so may the pruned channels.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    name, method, more, tolerance = CASES[case]
    task = find_task(name)
    {"text": tiny.text, "wikitext2": tiny.wikitext2}.get(task.name, lambda folder: folder)(tmp_path)
    recipe = replace(task.recipe("short"), epochs=4, switch_at=2, **more.get("recipe", {}))
    if task.name != "digits":
        recipe = replace(recipe, batch=8, lr=1.0 if task.name == "wikitext2" else recipe.lr)
    options = {key: value for key, value in more.items() if key != "recipe"}
    for name in ("eager", "compile"):
        given = RunSettings(
            training_method(method), recipe, tmp_path / name, data=tmp_path, device="cuda", quiet=True,
            compile=name == "compile", **options,
        )  # fmt: skip
        assert train(task, given) is not None
    close(tmp_path, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cifar10", "text"])
def test_updates_do_not_synchronize(name: str, tmp_path: Path) -> None:
    """Batches and updates are launched ahead of the device; only reading the loss synchronizes."""
    task = tiny.TINY[name].task
    (tiny.cifar10 if name == "cifar10" else tiny.text)(tmp_path)
    data = task.load(tmp_path)
    recipe = replace(task.recipe("short"), batch=8 if name == "cifar10" else 2)
    assert task.steps(data, recipe.batch) > 7
    given = RunSettings(training_method("dense"), recipe, tmp_path, device="cuda", precision="bf16")
    updates = StepRunner(build_components(task, given, data, 0, 1, torch.device("cuda", 0)))
    updates.begin_epoch(0, 0)
    for _ in range(4):
        updates.update(0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            updates.update(0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
