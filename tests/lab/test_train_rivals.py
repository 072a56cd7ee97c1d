"""Pruning methods and optimizers in `pufferfish train`: records, and resuming in and between their phases."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
import tiny
import torch
from test_train import SMALL, values, weights
from torch import Tensor, nn

from pufferfish.checkpoint.folder import list_checkpoints
from pufferfish.cli import main
from pufferfish.lab.method_name import training_method
from pufferfish.lab.model_change import ModelChange
from pufferfish.lab.tasks import Recipe
from pufferfish.lab.tasks.digits import Digits
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.console import Console
from pufferfish.lab.train.record import macs_per_row
from pufferfish.lab.train.step import StepRunner, build_components
from pufferfish.measure import read_run

METHODS = ["early-bird(0.4)", "lottery-ticket(2)"]
TIMED = ("seconds_a_step", "training_seconds", "peak_memory")


def same(one: Path, other: Path) -> None:
    """The two runs have the same metrics, results and weights."""
    a, b = read_run(one), read_run(other)
    for name in ("loss", "lr", "bytes", "valid/accuracy"):
        assert values(a, name) == values(b, name), name
    results = [{k: v for k, v in run.results.items() if k not in TIMED} for run in (a, b)]
    assert results[0] == results[1]
    theirs = weights(other)
    assert all(torch.equal(x, theirs[name]) for name, x in weights(one).items())


@pytest.mark.parametrize("method", METHODS)
def test_records(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits:width=8", "--epochs", "4", "--device", "cpu", "--method"]
    assert main([*words, method, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    run = read_run(tmp_path / "run")
    found, left = run.results, weights(tmp_path / "run")
    assert (run.name, run.settings["method"]) == (method, method)
    sizes = {name: x.numel() for name, x in left.items() if "running" not in name and "num_" not in name}
    w = [left[f"conv{i}.weight"] for i in (1, 2, 3)] + [left[f"fc{i}.weight"] for i in (1, 2)]
    places = (64, 64, 16, 1, 1)  # that each is multiplied with
    assert found["macs"] == sum(int(x.count_nonzero()) * n for x, n in zip(w, places, strict=True))
    if method.startswith("early"):
        assert "Early-Bird ticket drawn after 2 epochs: 10,402 → " in said.err
        assert found["parameters"] == sum(sizes.values()) < 10_402
        assert (found["epochs"], found["drawn_after"]) == (4, 2)
    else:
        assert "Lottery ticket, round 2 of 2: 6,558 of 10,248 weights left" in said.err
        assert "epoch 10/10, validation" in said.err
        assert found["parameters"] == 10_402 - 10_248 + 6_558
        assert sum(sizes.values()) == 10_402
        steps = [t["steps"] for t in found["trainings"]]
        assert steps == [80, 60, 60]
        assert [t["weights"] for t in found["trainings"]] == [10_248, 8_198, 6_558]
        rates = dict(values(run, "lr"))
        assert [rates[step + 60] for step in (40, 60, 80)] == [rates[step] for step in (40, 60, 80)]
    assert found["training_seconds"] >= run.metrics["loss"][-1][0]
    assert found["accuracy"] > 80
    first = found
    assert main([*words, method, "--out", str(tmp_path / "run")]) == 0  # it is done
    assert read_run(tmp_path / "run").results == first


@dataclass(frozen=True)
class Dropped(Digits):
    """With dropout."""

    width: int = 4

    def build(self) -> nn.Module:
        model = super().build()
        model.act1 = nn.Dropout(0.3)
        return model


@pytest.mark.filterwarnings("ignore:compression:UserWarning")  # channels go right after a restart
@pytest.mark.parametrize("simulate", [None, 2])
@pytest.mark.parametrize("method", METHODS)
def test_stopped(method: str, simulate: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are stopped in the first phase, between two, and in the last one are bit-identical."""
    task = Dropped()
    recipe = replace(task.recipe("short"), epochs=3, batch=128)
    steps = task.steps(task.load(None), recipe.batch)
    word = method + ("+powersgd(2)" if simulate else "")
    given = RunSettings(training_method(word), recipe, tmp_path / "straight", simulate=simulate, quiet=True)
    assert train(task, given) is not None
    stopped = replace(given, folder=tmp_path / "stopped")
    change = 1 if method.startswith("early") else 3  # the epoch at whose start it comes
    done = 0
    update = StepRunner.update
    for at in (steps // 2, change * steps, change * steps + steps // 2):
        left = list(range(at - done))

        def stopping(updates: StepRunner, lr: float, left: list[int] = left) -> Tensor:
            left.pop()
            if not left:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(updates, lr)

        with monkeypatch.context() as patched:
            patched.setattr(StepRunner, "update", stopping)
            assert train(task, stopped) is None
        done = int(list_checkpoints(stopped.folder / "checkpoints")[-1].name.split("-")[-1])
        assert done == at
    assert train(task, stopped) is not None
    same(given.folder, stopped.folder)


RATES = {"lars": 2.0, "lamb": 0.02, "sam": None}


@pytest.mark.parametrize("name", RATES)
def test_optimizers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rate = RATES[name]
    method = f"pufferfish(optimizer={name}{f',lr={rate}' if rate else ''})"
    assert main([*SMALL, "--method", method]) == 0
    assert f"{method}: test accuracy" in capsys.readouterr().out
    run = read_run(tmp_path / "runs" / f"digits-{method}-0")
    assert run.name == method
    assert run.settings["recipe"]["optimizer"] == name
    assert run.results["accuracy"] > 60
    assert run.results["low_rank_layers"] == 2


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["digits:mlp", "wikitext2"])
def test_an_update_of_sam(name: str, accumulate: int, tmp_path: Path) -> None:
    """Compared with a plain implementation; state carried from batch to batch advances once, not twice."""
    task, rho, rate = tiny.TINY[name].task, 0.05, 0.1
    tiny.TINY[name].write(tmp_path)
    data = task.load(tmp_path)
    recipe = Recipe(epochs=1, batch=8, lr=rate, momentum=0.0, optimizer="sam", rho=rho)
    given = RunSettings(training_method("dense"), recipe, tmp_path, accumulate=accumulate)
    components = build_components(task, given, data, 0, 1, torch.device("cpu"))
    plain = copy.deepcopy(components.module)
    updates = StepRunner(components)
    updates.begin_epoch(0, 0)
    loss = updates.update(rate)
    again = StepRunner(components)
    again.begin_epoch(0, 0)
    batches = list(islice(again._batches[0], accumulate))
    fresh = [x.clone() for x in batches[0][len(batches[0]) - task.carried_tensors :]]

    def gradients() -> tuple[float, list[Tensor], list[Tensor]]:
        carried = [x.clone() for x in fresh]
        losses = [
            task.loss(plain, (*batch[: len(batch) - task.carried_tensors], *carried), recipe) / accumulate
            for batch in batches
        ]
        total = sum(losses[1:], losses[0])
        return float(total.detach()), list(torch.autograd.grad(total, list(plain.parameters()))), carried

    first, g, _ = gradients()
    before = [p.detach().clone() for p in plain.parameters()]
    norm = torch.cat([x.flatten() for x in g]).norm()
    with torch.no_grad():
        for p, x in zip(plain.parameters(), g, strict=True):
            p += rho * x / norm
    _, g, carried = gradients()
    assert float(loss) == pytest.approx(first, rel=1e-5)
    for p, old, x in zip(components.module.parameters(), before, g, strict=True):
        torch.testing.assert_close(p.detach(), old - rate * x)
    for x, wanted in zip(updates._carried, carried, strict=True):
        torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("name", tiny.TINY)
def test_macs_of_every_task(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tiny.TINY[name]
    small.write(tmp_path)
    data, recipe = small.task.load(tmp_path), replace(small.task.recipe("short"), batch=8)
    model = small.model()
    given = RunSettings(training_method("dense"), recipe, tmp_path)
    components = build_components(small.task, given, data, 0, 1, torch.device("cpu"), model)
    drawn = torch.get_rng_state()
    found = macs_per_row(components, ModelChange(model, epochs=1, steps_per_epoch=1), Console())["macs"]
    assert torch.equal(torch.get_rng_state(), drawn)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n)
    assert found > matrices / 2  # each is multiplied with, but for tables of words
    assert not capsys.readouterr().err
