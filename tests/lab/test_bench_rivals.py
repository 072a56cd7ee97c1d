"""Rivals and optimizers in a bench: what is timed is what their runs have made, and the table tells what it cost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pufferfish.cli import main
from pufferfish.lab.advise.contender import Contender
from pufferfish.lab.bench import Asked, bench
from pufferfish.lab.bench.bench_settings import load
from pufferfish.lab.bench.cells import Cell, cells
from pufferfish.lab.bench.entry import entry
from pufferfish.lab.bench.learning_rates import grid
from pufferfish.lab.bench.timed_models import contenders, lacking
from pufferfish.lab.report import report
from pufferfish.lab.rivals import SAM
from pufferfish.lab.train.choice import choice
from pufferfish.measure import read

TASK = "digits:width=8"
LOTTERY, BIRD = "lottery-ticket-1", "early-bird-0.5"
ALL = ["dense", "pufferfish", "auto", LOTTERY, BIRD, "dense@lars=1"]

MINE = """
from dataclasses import dataclass
from pufferfish.compression import BFloat16

@dataclass(frozen=True)
class Mine(BFloat16):
    pass
"""


def rounds(root: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["methods"] for path in sorted((root / "timing").iterdir())]


def raced(root: Path, *methods: str) -> dict[str, Contender]:
    """What is timed in a finished bench of one worker."""
    asked = load(root)
    data = asked.found()[0].load(None)
    return contenders(list(methods), asked, root, data, rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The paper's two tables in one, small."""
    root = tmp_path_factory.mktemp("rivals") / "out"
    words = ["--epochs", "2", "--rounds", "2", "--methods", ",".join(ALL)]
    assert main(["bench", TASK, *words, "--out", str(root)]) == 0
    return root


@pytest.mark.timeout(120)
def test_the_table_of_one_worker(one_worker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--epochs", "2", "--rounds", "2", "--methods", "dense", "--out", str(one_worker)]
    assert main(["bench", TASK, *words]) == 0
    shown = capsys.readouterr()
    assert "timing" not in shown.err  # all was there
    lines = shown.out.splitlines()
    assert lines[2].split("  ")[0] == "method"
    heads = [head.strip() for head in lines[2].split("  ") if head]
    assert heads == [
        "method", "learning rate", "parameters", "MACs", "a step", "× dense", "accuracy, %", "to dense", "whole run", "run × dense",
    ]  # fmt: skip
    table = {line.split()[0]: [x for x in line.split("  ") if x] for line in lines[3:9]}
    assert list(table) == ALL  # one worker has nothing to send in bf16
    assert [row[1].strip() for row in table.values()] == ["0.03"] * 5 + ["1"]
    times = {name: read(one_worker / Cell(name, 0).name).results["training_seconds"] for name in table}
    assert float(table[LOTTERY][-1].rstrip("×")) == pytest.approx(times["dense"] / times[LOTTERY], abs=0.006)
    said = " ".join(shown.out.split())
    assert f"{LOTTERY}: its whole run is 2 trainings." in said
    assert "another number of steps" not in said
    for page in (shown.out, (one_worker / "report.html").read_text()):
        assert "no exchange" not in page
        assert "bytes a step" not in page
    assert f"| {BIRD} | {read(one_worker / Cell(BIRD, 0).name).results['parameters']:,} |" in report(
        [one_worker], "markdown"
    )
    assert [set(found) for found in rounds(one_worker)] == [set(table)] * 2
    assert all("alone" not in found for r in rounds(one_worker) for found in r.values())


@pytest.mark.timeout(120)
def test_a_rival_is_timed_as_its_run_ends(one_worker: Path) -> None:
    racing = raced(one_worker, "dense", LOTTERY, BIRD)
    for contender in racing.values():
        contender.step()
    results = {name: read(one_worker / Cell(name, 0).name).results for name in racing}
    for name in ("dense", BIRD):
        assert sum(p.numel() for p in racing[name].bare.parameters()) == results[name]["parameters"]
    recipes = [read(one_worker / Cell(name, 0).name).settings["recipe"] for name in ("dense", "dense@lars=1")]
    assert [(recipe["optimizer"], recipe["lr"]) for recipe in recipes] == [("sgd", 0.03), ("lars", 1.0)]
    assert results[BIRD]["parameters"] < results["dense"]["parameters"]
    shapes = {name: [p.shape for p in contender.bare.parameters()] for name, contender in racing.items()}
    assert shapes[LOTTERY] == shapes["dense"] != shapes[BIRD]
    weights = [p for p in racing[LOTTERY].bare.parameters() if p.dim() > 1]
    left = results[LOTTERY]["trainings"][-1]["weights"]
    assert sum(int(p.count_nonzero()) for p in weights) == left < sum(p.numel() for p in weights)


@pytest.mark.timeout(120)
def test_what_only_a_run_can_tell_waits_for_it(one_worker: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(one_worker, root)
    asked = load(root)
    assert lacking(asked, root) == []
    shutil.rmtree(root / "timing")
    assert lacking(asked, root) == ALL
    shutil.rmtree(root / Cell(BIRD, 0).name / "checkpoints")
    assert BIRD not in lacking(asked, root)
    for method in ALL:
        path = root / Cell(method, 0).name / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": None}))
    assert lacking(asked, root) == ["dense", "pufferfish", "dense@lars=1"]


@pytest.mark.timeout(240)
def test_rivals_and_optimizers_of_real_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["dense", "bf16", BIRD, f"{LOTTERY}+powersgd-1", "dense@sam"]
    words = ["--epochs", "2", "--rounds", "1", "--workers", "2", "--methods", ",".join(methods)]
    assert main(["bench", TASK, *words, "--out", str(tmp_path / "out")]) == 0
    found = rounds(tmp_path / "out")[0]
    assert list(found) == methods
    runs = {name: read(tmp_path / "out" / Cell(name, 0).name) for name in methods}
    parameters = {name: runs[name].results["parameters"] for name in methods}
    sent = {name: found[name]["bytes"] for name in methods}
    assert sent[BIRD] / sent["dense"] == parameters[BIRD] / parameters["dense"] < 1
    assert sent["dense@sam"] == sent["dense"]  # of its two passes one is sent
    assert [runs[m].name for m in methods] == methods
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:8]] == methods
    assert lines[8].startswith("no exchange")


def test_sam_steps_with_the_gradient_of_the_second_pass() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    w, b = (p.detach().clone().requires_grad_() for p in model.parameters())

    def loss(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, w, b).pow(2).mean()

    first = torch.autograd.grad(loss(w, b), (w, b))
    norm = torch.cat([g.flatten() for g in first]).norm()
    up = [(p + 0.05 * g / norm).detach().requires_grad_() for p, g in zip((w, b), first, strict=True)]
    second = torch.autograd.grad(loss(*up), up)
    contender = Contender(
        choice("dense"),
        model,
        lambda net: SAM(torch.optim.SGD(net.parameters(), lr=0.1), net),
        lambda net: net(x).pow(2).mean(),
    )
    contender.step()
    for p, old, g in zip(model.parameters(), (w, b), second, strict=True):
        torch.testing.assert_close(p.detach(), old.detach() - 0.1 * g)


def test_every_optimizer_tries_rates_of_its_own_size() -> None:
    asked = Asked(task="digits", methods=("dense@lars=1.6", "dense@sam"), tune=3)
    tried: dict[str, list[float | None]] = {}
    for cell in cells(asked, asked.found()[1]):
        if cell.lr is not None:
            tried.setdefault(cell.method, []).append(cell.lr)
    assert tried == {"dense": grid(0.03, 3), "dense@lars=1.6": grid(1.6, 3), "dense@sam": grid(0.03, 3)}


def test_an_at_sign_in_a_path_names_no_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "me@home" / "mine.py"
    file.parent.mkdir()
    file.write_text(MINE)
    assert entry(f"{file}:Mine").optimizer is None
    assert entry(f"{file}:Mine@lamb=0.01").optimizer == "lamb"


@pytest.mark.timeout(60)
def test_simulated_workers_have_a_ceiling_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(
        task="digits:mlp,width=8", methods=(), epochs=1, per_host=2, simulate=True, network="10mbit"
    )
    assert bench(asked, tmp_path) == []
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("no exchange"))
    assert "predicted" in line
    metrics = read(tmp_path / Cell("dense", 0).name).metrics
    step, exchange = (metrics[f"predicted/{name}"][-1][2] for name in ("step", "exchange"))
    found = json.loads((tmp_path / "summary.json").read_text())["methods"]["no exchange"]
    assert found == {"results": {}, "predicted": {"seconds_a_step": pytest.approx(step - exchange)}}
    assert 0 < exchange < step


@pytest.mark.parametrize(
    ("task", "more", "told"),
    [
        ("digits:mlp", ["--methods", "early-bird-0.5"], "no channels are scaled by a batch norm"),
        (TASK, ["--methods", "early-bird-0.5", "--epochs", "1"], "drawn between epochs"),
        (TASK, ["--methods", "early-bird-2"], "the share of channels to remove"),
        (TASK, ["--methods", "dense@lars"], "say --lr too (in a bench @lars=LR)"),
        (TASK, ["--methods", "dense@lion"], "after the @ comes sgd"),
        (TASK, ["--methods", "dense@lars=high"], "after the @ comes sgd"),
        (TASK, ["--methods", "dense@lars=-1"], "lr=-1.0: take a positive number"),
        (TASK, ["--methods", "dense@sam", "--workers", "2", "--simulate"], "each worker climbs by itself"),
        (TASK, ["--graph"], "CUDA graphs need a GPU"),
    ],
)
def test_bad_input_is_one_line(
    task: str, more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", task, *more, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
