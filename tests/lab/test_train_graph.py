"""Updates in CUDA graphs equal eager updates."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from pufferfish.lab.tasks import Task, find_task
from pufferfish.lab.tasks.digits import Digits
from pufferfish.lab.tasks.wikitext2 import Wikitext2
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.graphed_callable import WARM_UP
from pufferfish.lab.train.run_components import build_components
from pufferfish.lab.train.step_runner import StepRunner
from pufferfish.lab.train.training_method import training_method
from pufferfish.measure import read_run

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Dropped(Digits):
    """With dropout; sends SIGTERM before the `at`-th batch."""

    model: str = "mlp"
    width: int = 16
    at: int = 0

    def build(self) -> nn.Module:
        model = super().build()
        model.act1 = nn.Sequential(nn.ReLU(), nn.Dropout(0.3))
        return model

    def batches(self, *given: Any, **more: Any) -> Iterator[Any]:
        for batch in super().batches(*given, **more):
            if "generator" in more:  # training
                _made.append(self)
                if len(_made) == self.at:
                    os.kill(os.getpid(), signal.SIGTERM)
            yield batch


_made: list[Any] = []


@pytest.fixture(autouse=True)
def same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise cuDNN's sums differ from run to run, and so may the pruned channels."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def settings(task: Task, method: str, folder: Path, **more: Any) -> RunSettings:
    recipe = replace(task.recipe("short"), epochs=4, switch_at=2, **more.pop("recipe", {}))
    if isinstance(task, Wikitext2):
        recipe = replace(recipe, batch=8, lr=1.0)
    elif not isinstance(task, Digits):
        recipe = replace(recipe, batch=8)
    return RunSettings(
        training_method(method), recipe, folder, data=folder.parent, device="cuda", quiet=True, **more
    )  # fmt: skip


def close(one: Path, other: Path, tolerance: float) -> None:
    a, b = read_run(one), read_run(other)
    for name in ("loss", "valid/loss"):
        rows = [[(step, value) for _, step, value in run.metrics[name]] for run in (a, b)]
        assert [step for step, _ in rows[0]] == [step for step, _ in rows[1]]
        for (step, x), (_, y) in zip(*rows, strict=True):
            assert x == pytest.approx(y, rel=tolerance), (name, step)
    assert a.results["parameters"] == b.results["parameters"]


CASES = {
    "sgd, dropout": (Dropped(), "pufferfish", {}, 1e-3),
    "accumulate": (Dropped(), "pufferfish", {"accumulate": 2}, 1e-3),
    "simulated": (Dropped(), "pufferfish+powersgd-2", {"simulate": 4}, 1e-3),
    "simulated, accumulate": (Dropped(), "topk-0.1", {"simulate": 2, "accumulate": 2}, 1e-3),
    "adamw, clip": (tiny.TINY["text"].task, "pufferfish", {}, 1e-2),
    "carried state": (tiny.TINY["wikitext2"].task, "pufferfish", {}, 1e-2),
    "early bird": (find_task("digits:width=16"), "early-bird-0.5", {}, 0.05),
    "early bird, simulated": (
        find_task("digits:width=16"),
        "early-bird-0.5+powersgd-2",
        {"simulate": 2},
        0.05,
    ),
    "lottery ticket": (Dropped(), "lottery-ticket-2", {}, 1e-3),
    "lottery ticket, simulated": (Dropped(), "lottery-ticket-2", {"simulate": 2}, 1e-3),
    "sam": (Dropped(), "pufferfish", {"recipe": {"optimizer": "sam"}}, 1e-3),
    "sam, accumulate": (
        Dropped(),
        "lottery-ticket-2",
        {"recipe": {"optimizer": "sam"}, "accumulate": 2},
        1e-3,
    ),
    "sam, carried state": (tiny.TINY["wikitext2"].task, "dense", {"recipe": {"optimizer": "sam"}}, 1e-2),
    "lars": (Dropped(), "pufferfish", {"recipe": {"optimizer": "lars", "lr": 2.0}}, 1e-3),
    "lamb": (Dropped(), "pufferfish", {"recipe": {"optimizer": "lamb", "lr": 0.02}}, 1e-3),
    "channels-last, bf16": (find_task("digits:width=16"), "pufferfish", {"precision": "bf16"}, 0.2),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_eager(case: str, tmp_path: Path) -> None:
    """Also across a change of the model, after which the graph is captured again."""
    task, method, more, tolerance = CASES[case]
    {"text": tiny.text, "wikitext2": tiny.wikitext2}.get(task.name, lambda folder: folder)(tmp_path)
    for graph in (False, True):
        assert train(task, settings(task, method, tmp_path / str(graph), graph=graph, **more)) is not None
    close(tmp_path / "False", tmp_path / "True", tolerance)
    if "simulate" not in more:
        times = [name for name in read_run(tmp_path / "True").metrics if name.startswith("time/")]
        assert times == ["time/step"]  # the parts of a step are not visible


@pytest.mark.parametrize("simulate", [None, 2])
@pytest.mark.parametrize("at", [30, 50])  # of 80: before the change, and after
@pytest.mark.parametrize("method", ["pufferfish", "early-bird-0.5"])
def test_resumes(method: str, at: int, simulate: int | None, tmp_path: Path) -> None:
    task = Dropped() if method == "pufferfish" else Dropped(model="cnn")
    given = settings(task, method, tmp_path / "straight", graph=True, simulate=simulate)
    train(task, given)
    _made.clear()
    stopping, given = replace(task, at=at * (simulate or 1)), replace(given, folder=tmp_path / "stopped")
    assert train(stopping, given) is None
    assert train(stopping, given) is not None
    close(tmp_path / "straight", tmp_path / "stopped", 1e-3 if method == "pufferfish" else 0.05)


@pytest.mark.parametrize("name", ["cifar10", "text"])
def test_updates_do_not_synchronize(name: str, tmp_path: Path) -> None:
    """Batches and updates are launched ahead of the device; only reading the loss synchronizes."""
    task = tiny.TINY[name].task
    (tiny.cifar10 if name == "cifar10" else tiny.text)(tmp_path)
    data = task.load(tmp_path)
    batch = 8 if name == "cifar10" else 2
    recipe = replace(task.recipe("short"), batch=batch)
    assert task.steps(data, batch) > WARM_UP + 4
    for graph in (True, False):
        given = RunSettings(
            training_method("dense"), recipe, tmp_path, device="cuda", precision="bf16", graph=graph
        )
        updates = StepRunner(build_components(task, given, data, 0, 1, torch.device("cuda", 0)))
        updates.begin_epoch(0, 0)
        for _ in range(WARM_UP + 1):
            updates.update(0.1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                updates.update(0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_learning_rates_are_read_at_every_update(tmp_path: Path) -> None:
    """Also those that a switch has changed."""
    task = Dropped()
    given = settings(task, "dense", tmp_path, graph=True)
    updates = StepRunner(build_components(task, given, task.load(None), 0, 1, torch.device("cuda", 0)))
    updates.begin_epoch(0, 0)
    for _ in range(WARM_UP + 1):
        updates.update(0.1)
    before = [p.clone() for p in updates.components.module.parameters()]
    updates.update(0.0)
    assert all(torch.equal(p, x) for p, x in zip(updates.components.module.parameters(), before, strict=True))
    updates.update(0.1)
    assert not all(
        torch.equal(p, x) for p, x in zip(updates.components.module.parameters(), before, strict=True)
    )
    assert isinstance(updates.components.optimizer.param_groups[0]["lr"], float)


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp16's loss scaler"):
        settings(Dropped(), "dense", tmp_path, graph=True, precision="fp16")
    task = find_task("multi30k")
    with pytest.raises(ValueError, match="differ in shape"):
        replace(settings(Dropped(), "dense", tmp_path, graph=True)).check(task, 1)
    with pytest.raises(ValueError, match="supports one process, not 2"):
        settings(Dropped(), "dense", tmp_path, graph=True).check(Dropped(), 2)
