"""The command line: output, exit codes, and one-line errors for invalid input."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import pufferfish as pf
from paper import COUNTS
from pufferfish.cli import COMMANDS, main
from pufferfish.lab.models import REFERENCES

BUILD = "def build():\n    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))\n"
EXAMPLE = "def example():\n    return torch.randn(8, {}), torch.zeros(8, dtype=torch.long)\n"
LOSS = BUILD + EXAMPLE.format(64) + "def loss(output, target):\n    return "
#: The functions of users' files, by file.
FILES = {
    "model_only": BUILD,
    "with_batch": BUILD + EXAMPLE.format(64),
    "does_not_fit": BUILD + EXAMPLE.format(63),
    "no_target": BUILD + "def example():\n    return torch.randn(8, 64)\n",
    "nonsense": "def build():\n    return 'a model'\n",
    "a_pair": "def build():\n    return nn.Linear(64, 4), torch.randn(8, 64)\n",
    "frozen_text": "def build():\n    return nn.Sequential(nn.Embedding(200, 64), nn.Linear(64, 64).requires_grad_(False))\n",
    "unbuilt": "def build():\n    return {}['width']\n" + EXAMPLE.format(64),
    "no_labels": LOSS + "target.pair\n",
    "three_arguments": LOSS.replace("target)", "target, weight)") + "output.sum()\n",
    "not_a_number": LOSS + "output\n",
    "no_gradient": LOSS + "output.sum().item()\n",
}
ON = ("--network", "1gbit", "--nodes", "2", "--device", "cpu")


@pytest.fixture
def files(tmp_path: Path) -> str:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n\n{text}")
    return str(tmp_path)


@pytest.mark.parametrize("name", COUNTS)
def test_built_in_names_print_the_papers_hybrid_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("parameters"))
    before, after = COUNTS[name]
    assert line.split()[1:3] == [f"{before:,}", f"{after:,}"]


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in COMMANDS)


def test_help_lists_the_built_in_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    listed = capsys.readouterr().out.partition("reference model:")[2].partition("or your own")[0]
    assert [name.strip() for name in listed.split(",")[:-1]] == [*REFERENCES]


def test_gpt_plan_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--rank",
        "0.5",
        "--keep",
        "blocks.0.*",
        "--override",
        "blocks.1.up=8",
        "--multiple",
        "1",
        "--json",
    ]
    assert main(["plan", "gpt", *options]) == 0
    plan = pf.Plan.from_json(capsys.readouterr().out)
    assert plan["blocks.1.up"].rank == 8
    assert plan["blocks.2.up"].rank == 192
    assert plan["blocks.0.up"].reason == "kept by pattern 'blocks.0.*'"


def test_embeddings_and_frozen_layers(files: str, capsys: pytest.CaptureFixture[str]) -> None:
    def ranks(*options: str) -> list[int | None]:
        assert main(["plan", f"{files}/frozen_text.py", "--json", *options]) == 0
        return [e.rank for e in pf.Plan.from_json(capsys.readouterr().out)]

    assert ranks() == [None, None]
    assert ranks("--embed", "8") == [8, None]
    assert ranks("--embed", "energy:0.5")[0] in (16, 32)
    assert main(["plan", f"{files}/frozen_text.py"]) == 0
    assert "The plan changes nothing. What stays dense: 75% in Embedding: a lookup" in capsys.readouterr().out


def test_a_missing_batch_is_reported(files: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{files}/model_only.py"]) == 0
    out = capsys.readouterr().out
    assert "model_only.py has neither data() nor example(): MACs and times are omitted" in out
    assert "MACs forward" not in out
    assert main(["plan", f"{files}/with_batch.py", "--measure"]) == 0
    out = capsys.readouterr().out
    assert "neither" not in out
    assert "MACs backward" in out
    assert " ms " in out
    assert "\nexpected on cpu, eager: " in out


def test_a_module_and_the_budget_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "pufferfish.lab.models.decoders:GPT", "--rank", "budget:params=6e6"]) == 0
    out = capsys.readouterr().out
    after = int(next(x for x in out.splitlines() if x.startswith("parameters")).split()[2].replace(",", ""))
    assert 5_940_000 <= after <= 6_000_000
    assert "The ranks are those of the initial weights" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "resnet19"], "is not a built-in model"),
        (
            ["plan", "resnet18", "--rnk", "3"],
            "pufferfish plan: unknown argument --rnk (did you mean --rank?); see `pufferf",
        ),
        (
            ["merge", "{files}/model_only.py", "--out", "x", "--plan", "missing.json"],
            "missing.json: No such file or",
        ),
        (["plan", "resnet18", "extra"], "unknown argument extra; see `pufferfish plan --help`"),
        (["advise", "digits"], "pufferfish advise: a single process has no network"),
        (["train", "digits", "--method", "powersgdx"], "there is no powersgdx (did you mean powersgd?)"),
        (["plan", "missing.py:build"], "no such file"),
        (
            ["plan", "{files}/model_only.py:missing"],
            "has no function 'missing'; add `def missing(): return model`",
        ),
        (["plan", "{files}/nonsense.py"], "nonsense.py: build() must return a model, got str"),
        (["plan", "{files}/a_pair.py"], "got tuple; return the model alone, and a batch from example()"),
        (["plan", "{files}/no_target.py"], "no_target.py: example() must return a tuple of tensors"),
        (
            ["plan", "resnet18", "--out", "nowhere/x.json"],
            "--out nowhere/x.json: the folder nowhere does not exist",
        ),
        (["plan", "resnet18", "--out", "/proc/x.json"], "--out /proc/x.json: /proc is not a writable folder"),
        (["advise", "digits", "--out", "nowhere/x.json"], "the folder nowhere does not exist"),
        (["bench", "digits", "--out", "/proc/x"], "--out /proc/x: /proc is not a writable folder"),
        (["bench", "digits", "--epochs", "0"], "bench: --epochs 0: must be at least 1"),
        (["demo", "--out", "/proc/x"], "--out /proc/x: /proc is not a writable folder"),
        (["report", ".", "--out", "nowhere/x.html"], "the folder nowhere does not exist"),
        (["plan", "no.such.module:build"], "No module named"),
        (["plan", "{files}/unbuilt.py"], "unbuilt.py, line 5: building the model raised KeyError: 'width'"),
        (["plan", "{files}/does_not_fit.py"], "fit.py: the model on its batch raised RuntimeError: mat1"),
        (["advise", "{files}/unbuilt.py", *ON], "unbuilt.py, line 5: building the model raised KeyError"),
        (["advise", "{files}/does_not_fit.py", *ON], "on inputs of shape (8, 63) raised RuntimeError: mat1"),
        (["advise", "{files}/no_labels.py", *ON], "on (8, 4) and (8,) raised AttributeError: 'Tensor'"),
        (
            ["advise", "{files}/three_arguments.py", *ON],
            "loss(output, target) on (8, 4) and (8,) raised TypeError: ",
        ),
        (
            ["advise", "{files}/not_a_number.py", *ON],
            "loss(output, target) returned a tensor of shape (8, 4)",
        ),
        (["advise", "{files}/no_gradient.py", *ON], "loss(output, target) returned float"),
        (["plan", "{files}/model_only.py", "--measure"], "needs a batch"),
        (["plan", "{files}/with_batch.py", "--measure", "graph"], "move the model to a CUDA device"),
        (["plan", "resnet18", "--rank", "2.0"], "--rank=2.0: a share of the full rank is a float in"),
        (
            ["plan", "resnet18", "--rank", "1.5"],
            "--rank=1.5: a share of the full rank is a float in (0, 1), a fixed rank an int ≥ 1\n",
        ),
        (["plan", "resnet18", "--rank", "much"], "rank 'much'"),
        (["plan", "resnet18", "--embed", "8"], "embed: the model has no nn.Embedding"),
        (["plan", "resnet18", "--rank", "budget:params=1"], "budget is too small"),
        (["plan", "resnet18", "--keep", "layer9.*"], "matches no layer"),
        (["plan", "resnet18", "--override", "fc"], "PATTERN=R"),
        (["plan", "resnet18", "--measure", "--device", "nowhere"], "--device nowhere"),
        (["convert", "missing.pt", "--plan", "missing.json", "--out", "x.pt"], "missing.json"),
        (["merge", "missing.pt", "--out", "x.pt"], "missing.pt"),
    ],
)
def test_invalid_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([x.replace("{files}", files) for x in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"pufferfish {arguments[0]}: ")
    assert error.count("\n") == 1


def test_plan_convert_merge_on_files(tmp_path: Path, files: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "model.pt")
    plan, low, back = (str(tmp_path / name) for name in ("plan.json", "low.pt", "back.pt"))
    assert main(["plan", f"{files}/model_only.py", "--out", plan]) == 0
    assert main(["convert", str(tmp_path / "model.pt"), "--plan", plan, "--out", low]) == 0
    assert "4,420 → 2,372 parameters, 1.86× smaller" in capsys.readouterr().out
    assert main(["merge", low, "--out", back]) == 0
    assert "4,420 parameters" in capsys.readouterr().out
    pf.factorize_(model, pf.Plan.load(plan))
    pf.merge_(model)
    loaded = torch.load(back, weights_only=True)
    assert loaded["epoch"] == 3
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded["state_dict"][name], value)
    assert json.loads(Path(f"{low}.plan.json").read_text())["pufferfish_plan"] == 1


def test_methods_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom pufferfish.compression import PowerSGD\n"
        "@dataclass(frozen=True)\nclass Mine(PowerSGD):\n    pass\n"
    )
    assert (
        main(["methods", "threshold(0.1)", f"{tmp_path}/mine.py:Mine(rank=2)", "--workers", "2", "16"]) == 0
    )
    lines = capsys.readouterr().out.partition("\n\nmethod")[2].splitlines()
    assert lines[0].split()[-4:] == ["2", "workers", "16", "workers"]
    assert [line.split("  ")[0] for line in lines[1:3]] == ["threshold(tau=0.1)", "Mine(rank=2)"]
    assert main(["methods", "topkk"]) == 2
    assert "did you mean topk?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_into_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*([command] if command else []), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_page_of_help_is_short(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    def options(page: str) -> set[str]:
        with pytest.raises(SystemExit, match="0"):
            main([command, page])
        return set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help-all"}

    first = options("--help")
    assert len(first) <= 12
    if command in ("train", "bench", "advise"):
        assert options("--help-all") - first >= {"--device", "--precision"}


def test_a_second_ctrl_c_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would interrupt the end of the process, when a checkpoint is saved and said to be."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("pufferfish.cli.plan.run", lambda arguments: 130)  # as `train` after the first one
    monkeypatch.setattr("sys.argv", ["pufferfish", "plan", "lstm"])
    try:
        assert main() == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(name: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pufferfish.cli.plan.run", interrupt)
    assert main(["plan", "lstm"]) == 130
    assert capsys.readouterr().err == "pufferfish plan: interrupted\n"
