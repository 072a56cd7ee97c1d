"""Local steps in the lab: names, runs of real and of simulated workers, resumed in a flight and across the switch."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_train import values, weights
from torch import nn

from processes import in_processes
from pufferfish.checkpoint import Checkpoint
from pufferfish.compression import Int4, SparseLoCo
from pufferfish.lab.method_name import LocalMethod, training_method
from pufferfish.lab.tasks.language import Text
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.simulated import SimulatedLocalSteps
from pufferfish.measure import read_run

#: (method, optimizer, workers). All switch to low rank after the first of three epochs.
RUNS = [
    ("pufferfish+streaming(4,fragments=2)", "muon", 2),
    ("pufferfish(frobenius=0.1)+sparseloco(3)", "adamw", 2),
    pytest.param(
        "auto+streaming(5,fragments=3,delay=4,mixing=0.25,method=int4)", "adamw", 2, marks=pytest.mark.slow
    ),
    pytest.param("pufferfish+diloco(3)", "sgd", 4, marks=pytest.mark.slow),
    pytest.param("streaming(4,fragments=3,method=powersgd(2))", "adamw", 3, marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Stopped(Text):
    """Sends SIGTERM when so many training batches as `_left` says were made."""

    def batches(self, *given: Any, **more: Any) -> Iterator[Any]:
        for batch in super().batches(*given, **more):
            _left[0] -= "generator" in more
            if _left[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


_left = [0]
TASK = Stopped(d=64, layers=2, heads=2, context=8, dropout=0.1)


def settings(folder: Path, method: str, optimizer: str = "adamw", **more: Any) -> RunSettings:
    recipe = replace(
        TASK.recipe("short"), epochs=3, batch=24, switch_at=1, switch_lr=0.5, optimizer=optimizer, lr=0.01
    )
    given = RunSettings(training_method(method), recipe, folder, data=folder.parent, quiet=True, **more)
    return replace(given, save_every=3)


def real(rank: int, size: int, folder: str, method: str, optimizer: str, at: tuple[int, ...]) -> None:
    for _left[0] in at:
        stopped = _left[0] > 0
        assert (train(TASK, settings(Path(folder), method, optimizer)) is None) == stopped


@pytest.mark.parametrize(("method", "optimizer", "size"), RUNS)
def test_simulated_equals_real(method: str, optimizer: str, size: int, tmp_path: Path) -> None:
    """Two simulated workers are bit-identical to real ones; with more, sums may differ in the last bit.

    The real run is stopped and resumed, in an epoch after the switch and in a flight.
    """
    tiny.text(tmp_path)
    simulated = settings(tmp_path / "simulated", method, optimizer, simulate=size)
    assert train(TASK, simulated) is not None
    in_processes(real, size, str(tmp_path / "real"), method, optimizer, (10, 0))
    one, other = (read_run(tmp_path / name) for name in ("real", "simulated"))
    assert one.workers == other.workers == size
    assert values(one, "bytes") == [(step, pytest.approx(x)) for step, x in values(other, "bytes")]
    assert one.results["bytes"] > 0
    theirs, tolerance = weights(tmp_path / "real"), 0.0 if size == 2 else 1e-3
    assert (one.results["low_rank_layers"] > 0) == (training_method(method).model != "dense")
    for name, x in weights(tmp_path / "simulated").items():
        torch.testing.assert_close(x, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(("model", "update"), [("dense", 3), ("pufferfish", 7)])
def test_resumed_simulations_are_bit_identical(model: str, update: int, tmp_path: Path) -> None:
    """Stopped in an epoch, with an average on its way, and after the switch."""
    tiny.text(tmp_path)
    straight = settings(
        tmp_path / "straight", f"{model}+streaming(4,fragments=2,delay=3,method=int4)", simulate=2
    )
    assert train(TASK, straight) is not None
    stopped = replace(straight, folder=tmp_path / "stopped")
    predictions = 1 if model == "dense" else 2  # each takes a batch
    _left[0] = 2 * update + predictions
    assert train(TASK, stopped) is None
    assert Checkpoint.plan_in(stopped.folder / "checkpoints") is None or model == "pufferfish"
    assert train(TASK, stopped) is not None
    expected, found = weights(straight.folder), weights(stopped.folder)
    assert (read_run(straight.folder).results["low_rank_layers"] > 0) == (model == "pufferfish")
    for name, x in found.items():
        assert torch.equal(x, expected[name]), name
    assert read_run(straight.folder).results["bytes"] == read_run(stopped.folder).results["bytes"]


def test_simulated_workers_stay_as_many(tmp_path: Path) -> None:
    tiny.text(tmp_path)
    two = settings(tmp_path / "run", "diloco(3)", simulate=2)
    _left[0] = 2 * 3 + 1
    assert train(TASK, two) is None
    with pytest.raises(ValueError, match="a run with workers 2, not 3; choose another --out"):
        train(TASK, replace(two, simulate=3))


def test_names() -> None:
    def local(text: str) -> LocalMethod | None:
        method = training_method(text)
        assert method.compress is None
        return method.local

    assert local("diloco(30)") == LocalMethod(h=30)
    assert local("dense+streaming(30,fragments=4)") == LocalMethod(h=30, fragments=4, delay=7)
    assert local("sparseloco(30)") == LocalMethod(h=30, lr=1.0, momentum=0.0, compress=SparseLoCo())
    assert local("pufferfish+diloco(30,method=int4)") == LocalMethod(h=30, compress=Int4())
    assert local("streaming(8,fragments=2,delay=1,lr=1)") == LocalMethod(h=8, fragments=2, delay=1, lr=1)
    assert local("diloco(8,momentum=0,method=sparseloco(k=32))") == LocalMethod(
        h=8, momentum=0, compress=SparseLoCo(32)
    )
    assert training_method("sparseloco").compress == SparseLoCo()
    assert training_method("pufferfish+diloco(30)").model == "pufferfish"
    assert training_method("dense(optimizer=muon,lr=0.02)+diloco(30,lr=0.4)").optimizer == "muon"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streaming(30)", r"write it like streaming\(30,fragments=4\): the same in 4 parts"),
        ("diloco", r"write it like diloco\(30\): workers average their models"),
        ("streaming(4,fragments=5)", "fragments=5 exceeds h=4"),
        ("streaming(4,fragments=0)", "fragments=0 is not a number of fragments"),
        ("diloco(0)", "h=0 is not a number of updates"),
        ("diloco(8,lr=-1)", "outer lr=-1 must be at least 0"),
        (
            "diloco(8,rate=1)",
            "rate=1 is not an option of diloco; choose from h, fragments, delay, mixing, lr, momentum",
        ),
        ("diloco(8,0.5)", "0.5 is not an option of diloco"),
        ("diloco(8)+", "write word"),
        ("diloco(8)+int4", "write word"),
        ("diloco(8,method=sparseloco)", "SparseLoCo replaces outer momentum; pass momentum=0"),
        ("diloco(8,method=nothing)", "there is no nothing"),
        ("early-bird(0.5)+diloco(8)", "early-bird cannot be combined with local steps"),
        ("diloko(30)", r"there is no diloko \(did you mean diloco\?\); choose from .*diloco"),
    ],
)
def test_wrong_names(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training_method(text)


@pytest.mark.parametrize("delay", [0, 1])
def test_simulated_workers_return_from_a_model_that_is_not_finite(delay: int) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]
    local = SimulatedLocalSteps(LocalMethod(h=2, fragments=2, delay=delay, lr=1.0, momentum=0.0), 3)
    local.start(models)

    @torch.no_grad()
    def update(value: float) -> None:
        for model in models:
            for p in model.parameters():
                p.add_(1.0)
        models[2][0].bias.add_(value)
        local.step(models)

    for _ in range(4):
        update(0.0)
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(3):
            update(float("nan") if local.lost == 0 else 0.0)
    assert {w.category for w in caught} == {RuntimeWarning}
    assert all("all workers return to the last averaged model" in str(w.message) for w in caught)
    assert local.lost == 1
    local.sync(models)
    for model in models:
        for name, x in model.state_dict().items():
            assert x.isfinite().all()
            assert torch.equal(x, models[0].state_dict()[name])
