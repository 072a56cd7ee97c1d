"""Narrower dense models as large as the low-rank one: their widths, and `narrow` in train and bench."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY
from torch import nn

import pufferfish as pf
from pufferfish.cli import main
from pufferfish.lab.bench.bench_settings import BenchRun, load_settings
from pufferfish.lab.bench.timing import models_to_time, untimed_methods
from pufferfish.lab.method_name import NarrowMethod, training_method
from pufferfish.lab.report import report
from pufferfish.lab.tasks import Task, find_task
from pufferfish.lab.tasks.digits import Digits
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.settings import NarrowWidth, closest_width, find_width
from pufferfish.measure import read_run

TASK = "digits:mlp,width=16"
CPU = torch.device("cpu")


def settings(folder: Path, method: str, task: Task, **more: Any) -> RunSettings:
    recipe = replace(task.recipe("short"), epochs=1)
    return RunSettings(training_method(method), recipe, folder, quiet=True, **more)


def find(text: str, method: str = "narrow", folder: Path = Path()) -> NarrowWidth:
    task = find_task(text)
    return find_width(task, settings(folder, method, task))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def built(task: Any, width: float) -> nn.Module:
    model: nn.Module = task.build(width=width)
    return model


@pytest.mark.parametrize(
    ("text", "rank"), [("narrow", None), ("narrow(0.5)", 0.5), ("narrow(rank=0.125)", 0.125)]
)
@pytest.mark.parametrize("exchange", ["", "+powersgd(4)"])
def test_names_of_methods(text: str, rank: float | None, exchange: str) -> None:
    parsed = training_method(text + exchange)
    assert parsed.name == text + exchange
    assert (parsed.compress is not None) == bool(exchange)
    assert parsed.narrow == NarrowMethod(rank=rank)
    assert training_method("dense").narrow is None


@pytest.mark.parametrize("seed", range(5))
def test_the_closest_width(seed: int) -> None:
    """A function with steps, compared with the best of all its values."""
    edges = torch.rand(40, generator=torch.Generator().manual_seed(seed)).sort().values
    values = [0.05 * 1.1**i for i in range(41)]

    def ratio(width: float) -> float:
        return values[int((edges < width).sum())]

    width, found = closest_width(ratio, 40)
    best = min((abs(torch.tensor(v).log().item()), v) for v in values)[1]
    assert found == ratio(width) == best
    assert closest_width(lambda width: 0.9 * width, 40) == (1.0, 0.9)


def test_a_number_of_parameters() -> None:
    found = find(TASK, "narrow(parameters=5000)")
    size = count(built(find_task(TASK), found.width))
    assert abs(size / 5000 - 1) < 0.1
    assert found.note.endswith(f"{size:,} parameters, {size / 5000:.3f} of 5,000.")


@pytest.mark.parametrize("method", ["narrow", "narrow(0.5)"])
def test_as_many_parameters_as_the_low_rank_model(method: str) -> None:
    task = find_task("digits:mlp,width=64")
    found = find("digits:mlp,width=64", method)
    model = task.build()
    pf.factorize_(model, pf.plan(model, 0.5 if method == "narrow(0.5)" else 0.25, keep=task.keep))
    target, counts = count(model), {count(built(task, i / 100)) for i in range(1, 101)}
    nearest = min(counts, key=lambda n: abs(torch.tensor(n / target).log().item()))
    assert count(built(task, found.width)) == nearest == pytest.approx(target, rel=0.02)
    assert found.note == (
        f"{method}: {found.width:.3g} of the width, {nearest:,} parameters, {nearest / target:.3f} of the low-rank model's "
        f"{target:,} (rank {0.5 if method == 'narrow(0.5)' else 0.25})."
    )


@pytest.mark.parametrize("name", TINY)
def test_every_task_trains_a_narrower_model(name: str, tmp_path: Path) -> None:
    if name == "imagefolder":
        pytest.importorskip("PIL", reason="Pillow is not installed")
    tiny = TINY[name]
    tiny.write(tmp_path)
    task, data = tiny.task, tiny.task.load(tmp_path)
    model = built(task, 0.05 if tiny.build else 0.5)
    batch = next(task.batches(data, "train", 8, generator=torch.Generator()))
    task.loss(model, batch, task.recipe("short")).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert task.metric in task.evaluate(model, data, "valid")
    if task.carried_tensors:
        used = model.get_submodule("lstm").hidden_size
        for state in batch[-task.carried_tensors :]:
            assert state[..., :used].all()  # type: ignore[misc]
            assert not state[..., used:].any()  # type: ignore[misc]


@pytest.mark.timeout(120)
def test_a_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, methods = tmp_path / "out", ["pufferfish", "narrow", "narrow(0.5)"]
    words = ["bench", TASK, "--epochs", "2", "--rounds", "1", "--seeds", "2", "--out", str(out)]
    assert main([*words, "--methods", ",".join(methods)]) == 0
    shown = capsys.readouterr().out
    rows = [line.split()[0] for line in shown.splitlines()[3:7]]
    assert rows == ["dense", *methods]
    runs = {m: [read_run(out / BenchRun(m, seed).name) for seed in (0, 1)] for m in methods}
    for method in methods[1:]:
        first, second = (run.settings["narrow"] for run in runs[method])
        assert first == second
        assert first["note"] in " ".join(shown.split())
        assert first["note"] in report([out], markdown=True)
    sizes = {m: runs[m][0].results["parameters"] for m in methods}
    assert sizes["narrow"] == count(built(find_task(TASK), find(TASK).width))
    assert sizes["narrow"] == pytest.approx(sizes["pufferfish"], rel=0.05)
    assert runs["narrow"][0].results["macs"] < 0.6 * read_run(out / "runs/dense/seed-0").results["macs"]
    assert len({len(run.metrics["loss"]) for both in runs.values() for run in both}) == 1

    loaded = load_settings(out)
    data = find_task(TASK).load(None)
    models = models_to_time(methods, loaded, out, data, worker=0, workers=1, device=CPU)
    assert {m: count(model.inner) for m, model in models.items()} == sizes
    for path in (out / "timing").iterdir():
        path.unlink()
    assert untimed_methods(loaded, out) == ["dense", *methods]


@dataclass(frozen=True)
class Ignored(Digits):
    def build(self, width: float = 1.0) -> nn.Module:
        return super().build()


def test_a_task_that_ignores_its_width(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"digits builds the same model for width=0\.5 as for width=1\.0"):
        train(Ignored(), settings(tmp_path, "narrow", Ignored()))


@pytest.mark.parametrize(
    "method", ["narrow(2)", "narrow(0)", "narrow(1..2)", "narrow(parameters=0)", "narrow(parameters=1.5)"]
)
def test_invalid_ranks(method: str) -> None:
    with pytest.raises(ValueError, match=r"must be a (fraction between 0 and 1|whole number above 0)"):
        training_method(method)
