"""The mode of updates: which are tried, which is chosen, and that trials leave no trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY
from torch import Tensor, nn

from processes import in_processes
from pufferfish.cli import main
from pufferfish.lab.bench import BenchSettings
from pufferfish.lab.bench.bench_settings import load_settings
from pufferfish.lab.tasks import find_task
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.fastest_step import COMPILE_SECONDS, WORTH, FastestStep, Step
from pufferfish.lab.train.rewind_point import RewindPoint
from pufferfish.lab.train.run_components import RunComponents, build_components
from pufferfish.lab.train.simulated_step_runner import SimulatedStepRunner
from pufferfish.lab.train.step_modes import StepModes, step_modes
from pufferfish.lab.train.step_runner import StepRunner
from pufferfish.lab.train.training_method import training_method
from pufferfish.measure import read_run

ALL = ("compile+graph", "graph", "compile", "eager")
TASK = "digits:mlp,width=8"
FOREVER = 10**9


class Loop:
    """Updates of a small model with dropout and momentum, and a counter that is carried along."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.carried = torch.zeros(())
        self.batches = [torch.randn(64, 4) for _ in range(8)]
        self.lines: list[str] = []

    def update(self, inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        carried[0].add_(1)
        loss: Tensor = (self.model(inputs[0]) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def rewind_point(self, carried: Sequence[Tensor]) -> RewindPoint:
        state = [x for values in self.optimizer.state.values() for x in values.values()]
        return RewindPoint([*self.model.parameters(), *self.model.buffers(), *state, *carried])

    def run(self, in_mode: Callable[[str], Step], steps_left: int = FOREVER, **modes: Any) -> FastestStep:
        step = FastestStep(
            StepModes(**{"candidates": ALL, "refused": {}, "capturable": True} | modes), in_mode,
            rewind_point=self.rewind_point, loss=lambda loss: loss, tolerance=0.01,
            steps_left=lambda: steps_left, tell=self.lines.append,
        )  # fmt: skip
        self.losses = [float(step([x], [self.carried])) for x in self.batches]
        return step

    @property
    def state(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), self.carried, torch.tensor(self.losses), torch.rand(3)]


def modes_of(loop: Loop, **changed: Callable[[Sequence[Tensor], Sequence[Tensor]], Any]) -> Any:
    """`in_mode` whose modes are all eager, except those that are given, with + left out of their names."""
    return lambda mode: changed.get(mode.replace("+", ""), loop.update)


def assert_same_as_eager(loop: Loop) -> None:
    state = loop.state  # it draws random numbers, whose state the next line sets
    plain = Loop()
    plain.losses = [float(plain.update([x], [plain.carried])) for x in plain.batches]
    for ours, expected in zip(state, plain.state, strict=True):
        assert torch.equal(ours, expected)


def test_the_first_mode_that_works_is_chosen_and_trials_are_undone() -> None:
    loop, tried = Loop(), []

    def breaks(inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        tried.append("compile+graph")
        loop.update(inputs, carried)
        raise RuntimeError("the compiler gave up\nin many lines")

    def is_wrong(inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        tried.append("graph")
        return loop.update(inputs, carried) * 3

    step = loop.run(modes_of(loop, compilegraph=breaks, graph=is_wrong))
    assert step.mode == "compile"
    assert dict.fromkeys(tried) == dict.fromkeys(ALL[:2])
    (line,) = loop.lines
    assert line.startswith("mode: compile (compile+graph: the compiler gave up; graph: its loss is ")
    assert_same_as_eager(loop)


def test_all_fail() -> None:
    loop = Loop()

    def in_mode(mode: str) -> Step:
        if mode != "eager":
            raise ValueError(f"no {mode}")
        return loop.update

    assert loop.run(in_mode).mode == "eager"
    reasons = "; ".join(f"{mode}: no {mode}" for mode in ALL[:3])
    assert loop.lines == [f"mode: eager ({reasons})"]
    assert_same_as_eager(loop)


def test_a_wrong_second_loss_is_found() -> None:
    """The first loss does not depend on the gradients."""
    loop = Loop()

    def no_update(inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        before = [p.detach().clone() for p in loop.model.parameters()]
        loss = loop.update(inputs, carried)
        with torch.no_grad():
            for p, x in zip(loop.model.parameters(), before, strict=True):
                p.copy_(x).add_(0.3)
        return loss

    assert loop.run(modes_of(loop, compilegraph=no_update)).mode == "graph"
    assert "compile+graph: its loss is" in loop.lines[0]


def test_other_random_numbers_are_no_difference() -> None:
    """Compiled dropout draws other numbers than eager dropout."""
    loop = Loop()

    def drawn_anew(inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        torch.rand(17)
        return loop.update(inputs, carried)

    assert loop.run(modes_of(loop, compilegraph=drawn_anew)).mode == "compile+graph"
    assert loop.lines == ["mode: compile+graph"]


def test_losses_that_are_not_finite() -> None:
    loop = Loop()
    loop.batches = [x * math.nan for x in loop.batches]
    assert loop.run(modes_of(loop)).mode == "compile+graph"


@pytest.mark.parametrize(("steps_left", "mode"), [(0, "graph"), (FOREVER, "compile+graph")])
def test_short_runs_are_not_compiled(steps_left: int, mode: str) -> None:
    loop = Loop()
    assert loop.run(modes_of(loop), steps_left).mode == mode
    short = "mode: graph (compile: the 0 s left are too short for compiling to pay)"
    assert loop.lines == [short if steps_left == 0 else "mode: compile+graph"]
    assert COMPILE_SECONDS * WORTH > 60


def test_refused_modes_are_named() -> None:
    loop = Loop()
    step = loop.run(modes_of(loop), candidates=("compile", "eager"), refused={"graph": "batches differ"})
    assert (step.mode, loop.lines) == ("compile", ["mode: compile (graph: batches differ)"])


def on_cuda(monkeypatch: pytest.MonkeyPatch, **more: Any) -> RunSettings:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    task = find_task(TASK)
    return RunSettings(training_method("dense"), task.recipe("short"), Path(), device="cuda", **more)


@pytest.mark.parametrize(
    ("task", "more", "processes", "expected"),
    [
        (TASK, {}, 1, ALL),
        (TASK, {"precision": "fp16"}, 1, ("compile", "eager")),
        (TASK, {}, 2, ("eager",)),
        (TASK, {"simulate": 2}, 1, ("graph", "eager")),
        ("multi30k", {}, 1, ("compile", "eager")),
        (TASK, {"mode": "compile"}, 2, ("compile",)),
        (TASK, {"mode": "compile+graph"}, 1, ("compile+graph",)),
    ],
)
def test_candidates(
    task: str,
    more: dict[str, Any],
    processes: int,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = on_cuda(monkeypatch, **({"mode": "auto"} | more))
    modes = step_modes(find_task(task), given, processes)
    assert modes.candidates == expected
    assert modes.capturable == (given.graph_refusal(find_task(task), processes) is None)
    for part in ("compile", "graph"):  # a line can say why
        assert given.mode != "auto" or (part in modes.refused) != (part in expected)


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--mode compile\+graph: fp16's loss scaler .* use --mode auto"):
        on_cuda(monkeypatch, mode="compile+graph", precision="fp16")
    with pytest.raises(ValueError, match="--mode graph: batches of multi30k differ in shape"):
        on_cuda(monkeypatch, mode="graph").check(find_task("multi30k"), 1)
    with pytest.raises(ValueError, match="--mode graph: CUDA graphs support one process, not 2"):
        on_cuda(monkeypatch, mode="graph").check(find_task(TASK), 2)
    with pytest.raises(ValueError, match="--mode fast: must be one of auto, eager, compile"):
        on_cuda(monkeypatch, mode="fast")


def components(folder: Path, candidates: tuple[str, ...], **more: Any) -> RunComponents:
    task = find_task(TASK)
    recipe = replace(task.recipe("short"), clip=1.0)
    settings = RunSettings(training_method("dense"), recipe, folder, accumulate=2, **more)
    built = build_components(task, settings, task.load(None), 0, 1, torch.device("cpu"))
    return replace(built, modes=StepModes(candidates, {}, False))


@pytest.mark.parametrize("simulate", [None, 2])
def test_a_runner_falls_back(simulate: int | None, tmp_path: Path) -> None:
    """Capturing a CUDA graph really fails on a CPU; the updates are those of an eager run."""
    results = []
    for candidates in (("eager",), ("graph", "eager")):
        lines: list[str] = []
        kind = SimulatedStepRunner if simulate else StepRunner
        runner = kind(components(tmp_path, candidates, simulate=simulate), tell=lines.append)
        runner.begin_epoch(0, 0)
        results.append([float(runner.update(0.1)) for _ in range(8)])
        assert runner.mode == "eager"
        assert len(lines) == len(candidates) - 1
        assert all(line.startswith("mode: eager (compile: the 0 s left are too short") for line in lines)
        assert all("; graph: " in line for line in lines)
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_runner_compiles(tmp_path: Path) -> None:
    results = []
    for candidates in (("eager",), ("compile", "eager")):
        runner = StepRunner(components(tmp_path, candidates), steps_left=lambda: FOREVER)
        runner.begin_epoch(0, 0)
        results.append([float(runner.update(0.1)) for _ in range(8)])
    assert runner.mode == "compile"
    assert runner.model is not runner.components.model
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    runner.model_changed()
    assert runner.mode is None  # chosen again


def test_a_compiled_run_equals_an_eager_one(tmp_path: Path) -> None:
    """Across the switch; and its folder is resumed in the same mode only."""
    task = find_task(TASK)
    recipe = replace(task.recipe("short"), epochs=2, switch_at=1)
    for mode in ("eager", "compile"):
        given = RunSettings(
            training_method("pufferfish"), recipe, tmp_path / mode, mode=mode, quiet=True, accumulate=2
        )
        assert train(task, given) is not None
    runs = [read_run(tmp_path / mode) for mode in ("eager", "compile")]
    for name in ("loss", "valid/loss"):
        values = [[value for _, _, value in run.metrics[name]] for run in runs]
        assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert [run.results["mode"] for run in runs] == ["eager", "compile"]
    assert runs[1].results["low_rank_layers"] > 0
    assert {"time/forward", "time/backward"} <= runs[1].metrics.keys()
    with pytest.raises(ValueError, match="it holds a run with mode compile, not eager"):
        train(task, replace(given, mode="eager"))


def train_in(rank: int, size: int, folder: str, mode: str) -> None:
    task = find_task(TASK)
    recipe = replace(task.recipe("short"), epochs=2, switch_at=1, clip=1.0)
    method = training_method("pufferfish+powersgd-2")
    given = RunSettings(method, recipe, Path(folder), mode=mode, quiet=True, accumulate=2)
    assert train(task, given) is not None


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
            train(task, RunSettings(training_method("dense"), recipe, folder, mode="compile", quiet=True))
    assert set(compiled) == {folder.name for folder in folders}


@pytest.mark.slow
def test_ddp_is_compiled(tmp_path: Path) -> None:
    """With a compression hook, accumulation, clipping and the switch."""
    for mode in ("eager", "compile"):
        in_processes(train_in, 2, str(tmp_path / mode), mode)
    runs = [read_run(tmp_path / mode) for mode in ("eager", "compile")]
    for name in ("loss", "valid/loss", "bytes"):
        values = [[value for _, _, value in run.metrics[name]] for run in runs]
        assert values[0] == pytest.approx(values[1], rel=1e-3)
    assert runs[1].results["mode"] == "compile"


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
    TINY["text"].write(tmp_path)
    recipe = replace(task.recipe("short"), epochs=4, switch_at=2, batch=4)
    given = RunSettings(
        training_method("pufferfish"), recipe, tmp_path / "run", data=tmp_path, mode="compile", quiet=True
    )
    results = train(task, given)
    assert results is not None
    assert len(graphs) == 2
    assert results["shared_inputs"] == [[f"blocks.1.attention.{name}" for name in "qkv"]]


def test_a_bench_runs_in_one_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", TASK, "--epochs", "1", "--rounds", "1", "--methods", "dense", "--out", str(tmp_path)]
    assert main(words) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["mode"] == "eager"
    assert load_settings(tmp_path).mode == "eager"
    assert '<th scope="row">mode</th><td>eager</td>' in (tmp_path / "report.html").read_text()
    capsys.readouterr()
    assert main([*words, "--mode", "compile"]) == 2
    assert "mode was 'eager', now 'compile'" in capsys.readouterr().err


def test_a_bench_of_an_earlier_version(tmp_path: Path) -> None:
    settings = BenchSettings(task=TASK, methods=(), mode="graph")
    settings.save(tmp_path)
    saved = json.loads((tmp_path / "bench.json").read_text())
    del saved["mode"]
    (tmp_path / "bench.json").write_text(json.dumps(saved | {"graph": True}))
    assert replace(settings, mode="auto").merge_saved(tmp_path) == settings
