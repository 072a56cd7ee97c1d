"""Rivals in the loop: records, stopped and killed in and between their phases, and optimizers by their names."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
import tiny
import torch
from test_train import SMALL, values, weights
from test_train_workers import ENV, TORCHRUN
from torch import Tensor, nn

from pufferfish.checkpoint.checkpoint_folder import saved
from pufferfish.cli import main
from pufferfish.lab.rivals.model_change import Change
from pufferfish.lab.tasks.digits import Digits
from pufferfish.lab.tasks.task import Recipe
from pufferfish.lab.train import Settings, train
from pufferfish.lab.train.choice import choice
from pufferfish.lab.train.macs_per_row import macs_a_row
from pufferfish.lab.train.parts import Parts, build
from pufferfish.lab.train.screen import Screen
from pufferfish.lab.train.updates import Updates
from pufferfish.measure import read

METHODS = ["early-bird-0.4", "lottery-ticket-2"]
TIMED = ("seconds_a_step", "training_seconds", "peak_memory")


def same(one: Path, other: Path) -> None:
    """The two runs came to the same."""
    a, b = read(one), read(other)
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
    run = read(tmp_path / "run")
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
    first = found
    assert main([*words, method, "--out", str(tmp_path / "run")]) == 0  # it is done
    assert read(tmp_path / "run").results == first


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
    """In the first phase, between two, and in the last one: it goes on bit for bit."""
    task = Dropped()
    recipe = replace(task.recipe("short"), epochs=3, batch=128)
    steps = task.steps(task.load(None), recipe.batch)
    word = method + ("+powersgd-2" if simulate else "")
    given = Settings(choice(word), recipe, tmp_path / "straight", simulate=simulate, quiet=True)
    assert train(task, given) is not None
    stopped = replace(given, folder=tmp_path / "stopped")
    change = 1 if method.startswith("early") else 3  # the epoch at whose start it comes
    done = 0
    update = Updates.update
    for at in (steps // 2, change * steps, change * steps + steps // 2):
        left = list(range(at - done))

        def stopping(updates: Updates, lr: float, left: list[int] = left) -> Tensor:
            left.pop()
            if not left:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(updates, lr)

        with monkeypatch.context() as patched:
            patched.setattr(Updates, "update", stopping)
            assert train(task, stopped) is None
        done = int(saved(stopped.folder / "checkpoints")[-1].name.split("-")[-1])
        assert done == at
    assert train(task, stopped) is not None
    same(given.folder, stopped.folder)


KILLS = """
import os, signal
import torch.distributed as dist
from dataclasses import dataclass
from pufferfish.lab.tasks.digits import Digits

passes = 0

@dataclass(frozen=True)
class Kills(Digits):
    width: int = 4

    def loss(self, *given):
        global passes
        passes += 1
        last = not dist.is_initialized() or dist.get_rank() == 1
        if passes == {at} and last and not os.path.exists("killed"):
            open("killed", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(*given)
"""


def kills(method: str, at: int) -> list[str]:
    """The words of a run that is killed in its second phase, once."""
    Path("kills.py").write_text(KILLS.format(at=at))
    return ["-m", "pufferfish", "train", "kills.py:Kills", "--epochs", "2", "--method", method, "--save-every", "7",
            "--device", "cpu"]  # fmt: skip


@pytest.mark.timeout(120)
def test_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on, and comes to the same."""
    monkeypatch.chdir(tmp_path)
    words = kills("lottery-ticket-1", 50)
    killed = subprocess.run(
        [sys.executable, *words, "--out", "run"], env=ENV, capture_output=True, timeout=90
    )
    assert killed.returncode == -signal.SIGKILL
    for out in ("run", "straight"):
        assert main([*words[2:], "--out", out]) == 0
    same(Path("run"), Path("straight"))


@pytest.mark.timeout(200)
def test_a_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two, with compression."""
    monkeypatch.chdir(tmp_path)
    words = kills("early-bird-0.5+powersgd-2", 30)
    command = [*TORCHRUN, *words, "--out", "run"]
    codes = [subprocess.run(command, env=ENV, capture_output=True, timeout=90).returncode for _ in range(2)]
    assert codes[0]
    assert codes[1] == 0
    assert main([*words[2:], "--workers", "2", "--simulate", "--out", "straight"]) == 0
    same(Path("run"), Path("straight"))


RATES = {"lars": 2.0, "lamb": 0.02, "sam": None}


@pytest.mark.parametrize("name", RATES)
def test_optimizers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--method", "pufferfish", "--optimizer", name]
    rate = RATES[name]
    assert main([*words, *(["--lr", str(rate)] if rate else [])]) == 0
    assert f"pufferfish,{name}: test accuracy" in capsys.readouterr().out
    run = read(tmp_path / "runs" / f"digits-pufferfish,{name}-0")
    assert run.name == f"pufferfish,{name}"
    assert run.settings["recipe"]["optimizer"] == name
    assert run.results["accuracy"] > 60
    assert run.results["low_rank_layers"] == 2


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["digits:mlp", "wikitext2"])
def test_an_update_of_sam(name: str, accumulate: int, tmp_path: Path) -> None:
    """Against the obvious way; what a task carries from batch to batch goes on once, not twice."""
    task, rho, rate = tiny.TINY[name].task, 0.05, 0.1
    tiny.TINY[name].write(tmp_path)
    data = task.load(tmp_path)
    recipe = Recipe(epochs=1, batch=8, lr=rate, momentum=0.0, optimizer="sam", rho=rho)
    given = Settings(choice("dense"), recipe, tmp_path, accumulate=accumulate)
    parts = build(task, given, data, 0, 1, torch.device("cpu"))
    plain = copy.deepcopy(parts.bare)
    updates = Updates(parts)
    updates.begin(0, 0)
    loss = updates.update(rate)
    batches = list(islice(updates._epoch(0, 0, 0), accumulate))
    fresh = [x.clone() for x in batches[0][len(batches[0]) - task.carries :]]

    def gradients() -> tuple[float, list[Tensor], list[Tensor]]:
        carried = [x.clone() for x in fresh]
        losses = [
            task.loss(plain, (*batch[: len(batch) - task.carries], *carried), recipe) / accumulate
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
    for p, old, x in zip(parts.bare.parameters(), before, g, strict=True):
        torch.testing.assert_close(p.detach(), old - rate * x)
    for x, wanted in zip(updates._carried, carried, strict=True):
        torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("name", tiny.TINY)
def test_macs_of_every_task(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tiny.TINY[name]
    small.write(tmp_path)
    data, recipe = small.task.load(tmp_path), replace(small.task.recipe("short"), batch=8)
    model = small.model()
    given = Settings(choice("dense"), recipe, tmp_path)
    parts = Parts(small.task, given, data, model, model, None, None, None, 0, 1, torch.device("cpu"))  # type: ignore[arg-type]
    drawn = torch.get_rng_state()
    found = macs_a_row(parts, Change(model, epochs=1, an_epoch=1), Screen())["macs"]
    assert torch.equal(torch.get_rng_state(), drawn)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n)
    assert found > matrices / 2  # each is multiplied with, but for tables of words
    assert not capsys.readouterr().err
