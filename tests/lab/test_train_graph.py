"""Updates in CUDA graphs and compiled updates equal eager ones; what cannot be captured runs eagerly."""

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
from pufferfish.lab.train import RunSettings, fastest_step, train
from pufferfish.lab.train.graphed_callable import WARM_UP, GraphedCallable
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
    assert a.results.get("low_rank_updates") != 0  # None without a switch


# Large enough to become low-rank.
TEXT = find_task("text:d=64,layers=2,heads=2,context=8,dropout=0")
LLAMA = find_task("text:llama,d=64,layers=2,heads=2,context=8,dropout=0")
LSTM = find_task("wikitext2:d=64,bptt=5,dropout=0")

CASES = {
    "sgd, dropout": (Dropped(), "pufferfish", {}, 1e-3),
    "accumulate": (Dropped(), "pufferfish", {"accumulate": 2}, 1e-3),
    "simulated": (Dropped(), "pufferfish+powersgd-2", {"simulate": 4}, 1e-3),
    "simulated, accumulate": (Dropped(), "topk-0.1", {"simulate": 2, "accumulate": 2}, 1e-3),
    "adamw, clip": (TEXT, "pufferfish", {}, 1e-2),
    "carried state": (LSTM, "pufferfish", {}, 1e-2),
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
    "muon": (TEXT, "pufferfish", {"recipe": {"optimizer": "muon"}}, 1e-2),
    "muon, Frobenius decay, back": (
        TEXT,
        "pufferfish(at=0.25,back=0.75,frobenius=0.1)",
        {"recipe": {"optimizer": "muon"}},
        1e-2,
    ),
    "channels-last, bf16": (find_task("digits:width=16"), "pufferfish", {"precision": "bf16"}, 0.2),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_eager(case: str, tmp_path: Path) -> None:
    """Also across a change of the model, after which the graph is captured again."""
    task, method, more, tolerance = CASES[case]
    {"text": tiny.text, "wikitext2": tiny.wikitext2}.get(task.name, lambda folder: folder)(tmp_path)
    for mode in ("eager", "graph"):
        assert train(task, settings(task, method, tmp_path / mode, mode=mode, **more)) is not None
    close(tmp_path / "eager", tmp_path / "graph", tolerance)
    if "simulate" not in more:
        times = [name for name in read_run(tmp_path / "graph").metrics if name.startswith("time/")]
        assert times == ["time/step"]  # the parts of a step are not visible


COMPILED = {  # without dropout, for which compiled code draws other random numbers
    "sgd": (find_task("digits:mlp,width=16"), "pufferfish", {}, 1e-3),
    "accumulate": (find_task("digits:mlp,width=16"), "pufferfish", {"accumulate": 2}, 1e-3),
    "early bird": (find_task("digits:width=16"), "early-bird-0.5", {}, 0.05),
    "adamw, clip": (TEXT, "pufferfish", {}, 1e-2),
    "adamw, clip, bf16": (TEXT, "pufferfish", {"precision": "bf16"}, 0.05),
    "llama, bf16": (LLAMA, "pufferfish", {"precision": "bf16"}, 0.05),
    "muon, bf16": (TEXT, "pufferfish", {"precision": "bf16", "recipe": {"optimizer": "muon"}}, 0.05),
}


@pytest.mark.parametrize("mode", ["compile", "compile+graph"])
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_equals_eager(case: str, mode: str, tmp_path: Path) -> None:
    """Also across a change of the model, after which it is compiled again."""
    task, method, more, tolerance = COMPILED[case]
    if task.name == "text":
        tiny.text(tmp_path)
    for each in ("eager", mode):
        assert train(task, settings(task, method, tmp_path / each, mode=each, **more)) is not None
    close(tmp_path / "eager", tmp_path / mode, tolerance)
    assert read_run(tmp_path / mode).results["mode"] == mode


@pytest.mark.parametrize("worth", [0, fastest_step.WORTH])
@pytest.mark.parametrize("simulate", [None, 2])
def test_the_fastest_mode_is_chosen(
    simulate: int | None,
    worth: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before and after the switch; short runs, and simulated workers, are not compiled for."""
    monkeypatch.setattr(fastest_step, "WORTH", worth)
    task = find_task("digits:mlp,width=16")
    for mode in ("eager", "auto"):
        given = settings(task, "pufferfish", tmp_path / mode, mode=mode, simulate=simulate)
        assert train(task, replace(given, quiet=mode == "eager")) is not None
    close(tmp_path / "eager", tmp_path / "auto", 1e-3)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mode: ")]
    chosen = "graph" if simulate or worth else "compile+graph"
    assert [line.split()[1] for line in lines] == [chosen, chosen], lines
    assert all(("compile: " in line) == (chosen == "graph") for line in lines)
    assert read_run(tmp_path / "auto").results["mode"] == chosen


@dataclass(frozen=True)
class Reads(Dropped):
    """Its model reads a value on the host, which a graph cannot."""

    def build(self) -> nn.Module:
        model = super().build()
        model.act1 = nn.Sequential(model.act1, ReadsAValue())
        return model


class ReadsAValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if x.sum().item() < 1e9 else 0.5)


@pytest.mark.parametrize("simulate", [None, 2])
def test_falls_back(simulate: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model that cannot be captured trains as in eager mode, with the same random numbers."""
    stream = torch.cuda.current_stream()
    for mode in ("eager", "auto"):
        given = settings(Reads(), "pufferfish", tmp_path / mode, mode=mode, simulate=simulate)
        assert train(Reads(), replace(given, quiet=mode == "eager")) is not None
    close(tmp_path / "eager", tmp_path / "auto", 1e-3)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mode: ")]
    assert len(lines) == 2
    assert all(line.startswith("mode: eager (compile: ") and "; graph: " in line for line in lines)
    assert torch.cuda.current_stream() == stream


def test_simulated_local_steps_fall_back(tmp_path: Path) -> None:
    """Every worker goes on with its own random numbers."""
    for mode in ("eager", "auto"):
        given = settings(Reads(), "diloco-3", tmp_path / mode, mode=mode, simulate=2)
        assert train(Reads(), replace(given, quiet=True)) is not None
    close(tmp_path / "eager", tmp_path / "auto", 1e-3)


def test_a_graph_that_was_asked_for_and_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no CUDA graph can capture an update: .* use --mode auto"):
        train(Reads(), settings(Reads(), "dense", tmp_path, mode="graph"))
    assert (
        torch.nn.functional.dropout(torch.ones(8, device="cuda")).sum().item() >= 0
    )  # generators are usable


def test_other_shapes_run_eagerly() -> None:
    """Such as a smaller batch at the end of an epoch."""
    total = torch.zeros(3, device="cuda")

    def add(inputs: list[torch.Tensor], carried: list[torch.Tensor]) -> torch.Tensor:
        total.add_(inputs[0].sum(0))
        return inputs[0].sum()

    call = GraphedCallable(add)
    rows = [4] * (WARM_UP + 2) + [1, 4]
    results = [float(call([torch.ones(n, 3, device="cuda")])) for n in rows]
    assert results == [3.0 * n for n in rows]
    assert total.tolist() == [sum(rows)] * 3


@pytest.mark.parametrize("simulate", [None, 2])
@pytest.mark.parametrize("at", [30, 50])  # of 80: before the change, and after
@pytest.mark.parametrize("method", ["pufferfish", "early-bird-0.5"])
def test_resumes(method: str, at: int, simulate: int | None, tmp_path: Path) -> None:
    task = Dropped() if method == "pufferfish" else Dropped(model="cnn")
    given = settings(task, method, tmp_path / "straight", mode="graph", simulate=simulate)
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
    for mode in ("graph", "eager"):
        given = RunSettings(
            training_method("dense"), recipe, tmp_path, device="cuda", precision="bf16", mode=mode
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
    given = settings(task, "dense", tmp_path, mode="graph")
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
