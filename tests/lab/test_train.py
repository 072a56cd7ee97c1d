"""`pufferfish train` in one process: records, stopping and resuming, and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from pufferfish.cli import command_parser, main
from pufferfish.cli.train import train_settings
from pufferfish.compression import BFloat16, Int2, Int4, LoCo, PowerSGD, SparseLoCo
from pufferfish.lab.bench import BenchSettings
from pufferfish.lab.method_name import training_method
from pufferfish.lab.report import report
from pufferfish.lab.tasks import find_task
from pufferfish.lab.tasks.digits import Digits
from pufferfish.lab.tasks.language import Wikitext2
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.workers import check_gpu_count
from pufferfish.measure import Run, read_run

SMALL = ["train", "digits:mlp,width=16", "--epochs", "3", "--device", "cpu"]


def values(run: Run, name: str) -> list[tuple[int, float]]:
    return [(step, value) for _, step, value in run.metrics[name]]


def weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    newest = max((folder / "checkpoints").iterdir(), key=lambda path: path.name)
    (file,) = newest.glob("model*.safetensors")
    return load_file(file)


def test_no_two_workers_share_a_gpu() -> None:
    there = torch.cuda.device_count()
    check_gpu_count("cpu", there + 1)
    with pytest.raises(ValueError, match=f"{there + 1} workers on {there} GPU"):
        check_gpu_count("cuda", there + 1)


def test_choices() -> None:
    assert training_method("dense").compress is None
    assert training_method("bf16").compress == BFloat16()
    few_bits = [training_method(text).compress for text in ("int4", "int2", "loco", "pufferfish+sparseloco")]
    assert few_bits == [Int4(), Int2(), LoCo(), SparseLoCo()]
    assert training_method("pufferfish+powersgd(rank=2)").compress == PowerSGD(2)
    for written, same in (
        ("dense+topk(0.01)", "topk(0.01)"),
        (
            " pufferfish( rank=0.5, at=0.1 ) + bf16 ",
            "pufferfish( rank=0.5,at=0.1 )+bf16".replace("( ", "(").replace(" )", ")"),
        ),
        ("diloco(30, lr=0.5, method=powersgd(4))", "diloco(30,lr=0.5,method=powersgd(4))"),
    ):
        assert training_method(written) == training_method(same)
        assert training_method(written).name == same
    for text, message in (
        ("auto+", r"an exchange follows the \+"),
        ("dens", "there is no dens"),
        ("dense+nothing", "there is no nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            training_method(text)


def test_records_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("dense", "pufferfish"):
        out = tmp_path / method
        assert main([*SMALL, "--method", method, "--out", str(out)]) == 0
        said = capsys.readouterr()
        assert f"{method}: test accuracy" in said.out
        assert said.err.count("epoch 3/3, validation accuracy") == 1  # no terminal: a line an epoch
        assert "resumed" not in said.err
        assert "\r" not in said.err
        run = read_run(out)
        assert run.results["accuracy"] > 60
        for key in ("parameters", "low_rank_layers", "bytes_a_step", "seconds_a_step", "peak_memory"):
            assert run.results[key] >= 0, key
        assert run.results["training_seconds"] >= run.metrics["loss"][-1][0]
        assert {"loss", "lr", "bytes", "valid/accuracy", "time/forward", "time/step"} <= run.metrics.keys()
    dense, small = (read_run(tmp_path / name) for name in ("dense", "pufferfish"))
    assert small.results["parameters"] < dense.results["parameters"]
    assert dense.results["macs"] == 64 * 64 + 64 * 64 + 64 * 10
    assert small.results["macs"] == sum(
        (sum(layer["shape"]) * layer["rank"] if layer["rank"] else layer["shape"][0] * layer["shape"][1])
        for layer in small.layers
    )
    first = dense.results
    assert main([*SMALL, "--out", str(tmp_path / "dense")]) == 0  # it is done
    assert capsys.readouterr().err == "all updates are done: 60 of 60\n"
    assert read_run(tmp_path / "dense").results == first
    page = report([tmp_path])
    assert "pufferfish" in page
    assert "accuracy" in page


@dataclass(frozen=True)
class Stopped(Digits):
    """Sends SIGTERM at the `at`-th batch; the model has dropout and BatchNorm."""

    model: str = "cnn"
    width: int = 4
    at: int = 0

    def build(self) -> nn.Module:
        model = super().build()
        model.act1 = nn.Dropout(0.3)
        return model

    def loss(self, model: nn.Module, batch: Any, recipe: Any) -> Tensor:
        return _stopping(self, super().loss(model, batch, recipe))


@dataclass(frozen=True)
class StoppedLSTM(Wikitext2):
    """The same for a task that carries state from batch to batch."""

    at: int = 0

    def loss(self, model: nn.Module, batch: Any, recipe: Any) -> Tensor:
        return _stopping(self, super().loss(model, batch, recipe))


_seen: dict[Any, int] = {}


def _stopping(task: Any, loss: Tensor) -> Tensor:
    _seen[task] = _seen.get(task, 0) + 1
    if _seen[task] == task.at:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss


@pytest.mark.parametrize(("kind", "simulate"), [("images", None), ("images", 2), ("text", None), ("text", 2)])
def test_stopped_in_an_epoch(kind: str, simulate: int | None, tmp_path: Path) -> None:
    """A run that was stopped in the middle of an epoch and resumed is bit-identical to an uninterrupted one."""
    if kind == "images":
        task: Any = Stopped()
        recipe = replace(task.recipe("short"), epochs=3, batch=240, switch_at=1)
    else:
        tiny.wikitext2(tmp_path)
        task = StoppedLSTM(d=8, bptt=10, dropout=0.2)
        recipe = replace(task.recipe("short"), epochs=3, batch=8, lr=1.0, switch_at=1)
    passes = (simulate or 1) * 2
    given = RunSettings(
        training_method("pufferfish+powersgd(2)" if simulate else "pufferfish"), recipe, tmp_path / "straight",
        data=tmp_path, accumulate=2, simulate=simulate, quiet=True,
    )  # fmt: skip
    steps = task.steps(task.load(tmp_path), recipe.batch)
    assert steps > 4
    straight = train(task, given)
    _seen.clear()
    stopping = replace(task, at=passes * (2 * steps + steps // 2))
    given = replace(given, folder=tmp_path / "stopped")
    assert train(stopping, given) is None
    assert read_run(given.folder).finished is None
    again = train(stopping, given)
    assert straight is not None
    assert again is not None
    timed = {"seconds_a_step", "training_seconds", "peak_memory"}
    assert {k: v for k, v in again.items() if k not in timed} == {
        k: v for k, v in straight.items() if k not in timed
    }
    one, other = (read_run(tmp_path / name) for name in ("straight", "stopped"))
    for name in ("loss", "bytes", f"valid/{task.metric}"):
        assert values(one, name) == values(other, name)
    for (name, a), (other_name, b) in zip(
        weights(tmp_path / "straight").items(), weights(tmp_path / "stopped").items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("lr", "method", "save_every"),
    [(1e30, "dense", None), (1e30, "pufferfish", 15), (1e18, "pufferfish", None)],
)
def test_a_run_that_diverges(
    lr: float, method: str, save_every: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends after that epoch, with a score, and does not fail at the switch.

    The same command then gives the same results.
    """
    task = find_task("digits:mlp,width=16")
    recipe = replace(task.recipe("short"), epochs=4, lr=lr, warm_up=0.0, switch_at=2)
    given = RunSettings(training_method(method), recipe, tmp_path / "run", save_every=save_every)
    results = train(task, given)
    assert results is not None
    updates = task.steps(task.load(None), recipe.batch)
    assert results["updates"] == updates
    run = read_run(tmp_path / "run")
    assert run.finished is not None
    assert [step for _, step, _ in run.metrics["valid/accuracy"]] == [updates]
    message = f"inf or NaN in the weights after {updates} updates; training ends here"
    assert capsys.readouterr().err.count(message) == 1
    assert train(task, given) is not None
    assert capsys.readouterr().err == f"resumed after update {updates} of {4 * updates}\n{message}\n"
    again = read_run(tmp_path / "run")
    assert (again.results, again.layers) == (run.results, run.layers)
    assert repr(again.metrics) == repr(run.metrics)  # NaN is not equal to itself


def test_simulated_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times of simulated workers are predicted and marked as such."""
    words = [
        "--method",
        "pufferfish+topk",
        "--per-node",
        "4",
        "--simulate",
        "--network",
        "1gbit",
    ]
    assert main([*SMALL, *words, "--out", str(tmp_path / "run")]) == 0
    assert "predicted, not measured" in capsys.readouterr().err
    run = read_run(tmp_path / "run")
    assert (run.workers, run.settings["simulated"], run.link and run.link["asked"]) == (4, True, "1gbit")
    assert "seconds_a_step" not in run.results
    small, dense = run.predicted["seconds_a_step"], run.predicted["warm_up_seconds_a_step"]
    assert small > 0
    assert run.metrics["loss"][-1][:2] == (
        pytest.approx(20 * dense + 40 * small, rel=0.05),
        60,
    )  # its time, too
    assert not any(name.startswith("time/") for name in run.metrics)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digit"], "did you mean digits"),
        (["digits", "--method", "puffer"], "there is no puffer"),
        (
            ["digits", "--method", "early-bird(2)"],
            "method 'early-bird(2)': ratio=2 must be a fraction between 0 and 1",
        ),
        (
            ["digits", "--method", "lottery-ticket(0.5)"],
            "rounds=0.5 must be a whole number above 0",
        ),
        (["digits:mlp", "--method", "early-bird"], "no channels are scaled by a batch norm"),
        (["digits", "--method", "early-bird", "--epochs", "1"], "drawn between epochs"),
        (["digits", "--recipe", "long"], "choose from short"),
        (
            ["digits", "--method", "dense(optimizer=lion)"],
            "is not one of sgd, adam, adamw, muon, lars, lamb, sam",
        ),
        (
            ["digits", "--method", "dense(optimizer=lars)"],
            "give its lr, too, as in dense(optimizer=lars,lr=1.6); the recipe's 0.03 is for sgd",
        ),
        (["digits", "--recipe", "short,optimizer=adamw"], "give its lr, too"),
        (
            ["digits", "--method", "dense(optimizer=sam)", "--simulate", "--per-node", "2"],
            "--simulate does not support",
        ),
        (
            ["digits", "--method", "auto(frobenius=0.1,optimizer=lamb)", "--lr", "0.01"],
            "optimizer=lamb: it scales weight decay by its trust ratio",
        ),
        (["digits", "--batch", "0"], "Recipe: batch=0 must be 1 or more"),
        (["digits", "--epochs", "0"], "Recipe: epochs=0 must be 1 or more"),
        (["digits", "--lr", "-1"], "Recipe: lr=-1.0 must be a positive number"),
        (["digits", "--batch", "10000"], "training images"),
        (["digits", "--out", "/dev/null/run"], "/dev/null is not a writable folder"),
        (["digits", "--out", "/proc/run"], "--out /proc/run: /proc is not a writable folder"),
        (["digits", "--accumulate", "3"], "cannot be split equally over 1 workers and 3 passes"),
        (
            ["multi30k", "--accumulate", "2"],
            "--accumulate 2: batches of multi30k differ in their number of tokens",
        ),
        (["digits", "--save-every", "0"], "--save-every 0"),
        (["digits:held=-1"], "held=-1 is too small"),
        (["cifar10", "--data", "nowhere"], "nowhere"),
        (["digits", "--per-node", "3"], "cannot be split equally over 3 workers"),
        (["digits", "--per-node", "65"], "must be 1 to 64"),
        (["digits", "--per-node", "2", "--batch", "10000"], "training images"),
        (["digits", "--per-node", "2", "--network", "1gbit"], "number of machines with --nodes N"),
        (["digits", "--per-node", "2", "--out", "/dev/null/run"], "/dev/null is not a writable folder"),
        (["cifar10", "--per-node", "2", "--data", "nowhere"], "nowhere"),
        (["digits", "--network", "1gbit"], "number of machines with --nodes N"),
        (["digits", "--network", "fast", "--nodes", "2"], "network 'fast'"),
        (["digits", "--network", "10gbit", "--nodes", "2"], "too fast to be emulated"),
        (["digits", "--simulate"], "give the number of simulated workers"),
        (["digits", "--simulate", "--per-node", "3"], "cannot be split equally over 3 workers"),
        (["digits", "--simulate", "--per-node", "2", "--network", "1"], "network '1'"),
        (
            [
                "digits",
                "--simulate",
                "--per-node",
                "2",
                "--method",
                "dense(optimizer=adam,lr=0.001)+dgc",
            ],
            "momentum, and so does the Adam",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("epochs", "at"), [(1, 1), (3, 1), (6, 2), (12, 4), (24, 8)])
def test_the_warm_up_keeps_its_share(epochs: int, at: int) -> None:
    """In `train` and in a bench."""
    usual = find_task("digits").recipe("short")
    words = ["train", "digits", "--epochs", str(epochs), "--device", "cpu"]
    _, given = train_settings(command_parser(["train"]).parse_args(words))
    assert given.recipe == replace(usual, epochs=epochs, switch_at=at)
    assert BenchSettings(task="digits", methods=(), epochs=epochs).resolve()[1] == given.recipe


@pytest.mark.parametrize("words", [["short,switch_at=2", "--epochs", "6"], ["short,switch_at=2,epochs=6"]])
def test_a_given_switch_is_not_scaled(words: list[str]) -> None:
    """In `train` and in a bench."""
    _, given = train_settings(
        command_parser(["train"]).parse_args(["train", "digits", "--device", "cpu", "--recipe", *words])
    )
    assert (given.recipe.epochs, given.recipe.switch_at) == (6, 2)
    epochs = 6 if "--epochs" in words else None
    bench = BenchSettings(task="digits", methods=(), recipe=words[0], epochs=epochs)
    assert bench.resolve()[1] == given.recipe


def test_begun_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a kill in the first epoch."""
    words = [*SMALL, "--out", str(tmp_path / "run")]
    assert main(words) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(about | {"finished": None}))
    capsys.readouterr()
    assert main(words) == 0
    assert "no checkpoint yet, starting over\n" in capsys.readouterr().err
    assert values(read_run(tmp_path / "run"), "loss")[-1][0] == 60


def test_another_run_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    task = Digits("mlp", width=4)
    given = RunSettings(
        training_method("dense"), replace(task.recipe("short"), epochs=1), tmp_path, quiet=True
    )
    train(task, given)
    other = replace(given, recipe=replace(given.recipe, lr=0.5))
    with pytest.raises(ValueError, match=r"lr 0\.1, not 0\.5"):
        train(NeverLoaded("mlp", width=4), other)


class NeverLoaded(Digits):
    def load(self, folder: Path | None) -> Any:
        raise AssertionError("the run must be rejected first")

    def __repr__(self) -> str:
        return super().__repr__().replace("NeverLoaded", "Digits")


def test_another_run_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits:mlp,width=4", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--epochs", "1"]) == 0
    capsys.readouterr()
    for other, message in (
        (["--epochs", "2"], "epochs 1, not 2"),
        (["--epochs", "1", "--method", "auto"], "dense"),
        (["--epochs", "1", "--seed", "1"], "seed 0, not 1"),
        (["--epochs", "1", "--precision", "bf16"], "precision fp32, not bf16"),
        (["--epochs", "1", "--simulate", "--per-node", "2"], "simulated False, not True"),
    ):
        assert main([*words, *other]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "choose another --out" in error


def test_another_simulated_run_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other workers or another network are another run, since its times were predicted for them."""
    words = [
        "train",
        "digits:mlp,width=4",
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--out",
        str(tmp_path),
        "--simulate",
    ]
    assert main([*words, "--per-node", "2", "--network", "10mbit"]) == 0
    first = read_run(tmp_path)
    capsys.readouterr()
    for other, message in (
        (["--per-node", "4", "--network", "10mbit"], "workers 2, not 4"),
        (["--per-node", "2", "--network", "1gbit"], "network 10mbit, not 1gbit"),
    ):
        assert main([*words, *other]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "choose another --out" in error
    assert main([*words, "--per-node", "2", "--network", "10mbit"]) == 0
    again = read_run(tmp_path)
    assert (again.workers, again.link, again.predicted) == (first.workers, first.link, first.predicted)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert main([*SMALL, "--tensorboard", "--out", str(tmp_path)]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    found = [(event.step, event.value) for event in seen.Scalars("loss")]
    assert found == [(step, pytest.approx(x)) for step, x in values(read_run(tmp_path), "loss")]


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("words", "message"), [(["digit"], "did you mean"), (["digits", "--per-node", "2"], "under torchrun")]
)
def test_one_error_message_under_torchrun(
    words: list[str],
    message: str,
    rank: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert (message in error) if rank == "0" else not error


@pytest.mark.timeout(60)
def test_port_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", port),
        ):
            monkeypatch.setenv(name, value)
        assert main([*SMALL, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error
    assert not list(tmp_path.iterdir())
