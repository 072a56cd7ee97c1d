"""Numbers on the command line: every option refuses what is not a number, is not finite or overflows."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pufferfish.cli import COMMANDS, _parser, main
from pufferfish.cli.arguments import number, whole


def number_options() -> list[tuple[list[str], str]]:
    """Each command with its required arguments, and each of its options that takes a number."""
    choices = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    found = []
    for name, parser in choices.items():
        assert not any(action.type in (int, float) for action in parser._actions), f"{name}: unchecked number"
        positional = [a.metavar for a in parser._actions if not a.option_strings and a.nargs != "*"]
        options = [action.option_strings[-1] for action in parser._actions if action.type in (number, whole)]
        found += [([name, *map(str, positional)], option) for option in options]
    return found


def test_every_command_is_looked_at() -> None:
    assert {line[0] for line, _ in number_options()} == {
        "plan",
        "advise",
        "methods",
        "train",
        "bench",
        "report",
    }
    assert len(COMMANDS) == 12
    assert len(number_options()) > 25


@pytest.mark.parametrize(
    ("line", "option"), number_options(), ids=lambda x: x if isinstance(x, str) else x[0]
)
def test_numbers_are_checked_by_name(
    line: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("1e400", "inf", "-inf", "nan", "9" * 5000, "many", ""):
        with pytest.raises(SystemExit, match="2"):
            main([*line, f"{option}={value}"])
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"argument {option}: '{value[:37]}" in last
        assert "is not a" in last
        assert len(last) < 160


def test_a_word_that_an_option_has_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--keep", "conv1", "lstm"])
    said = capsys.readouterr().err
    assert said.startswith(
        "pufferfish plan: the following arguments are required: MODEL; put them before --keep; see `"
    )


def test_numbers_are_read() -> None:
    assert (whole("-3"), whole(str(2**63 - 1)), number("1e-3"), number("7")) == (-3, 2**63 - 1, 1e-3, 7.0)
    for text in (str(2**63), "1.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            whole(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "train digits --rank 0.25",
            "train: unknown argument --rank: write --method 'pufferfish(rank=0.25)'; see `pufferfish train --help`\n",
        ),
        ("plan lstm --rank 0", "plan: --rank=0: a fixed rank is a whole number ≥ 1, a share of the full rank a float such as 0.25\n"),
        ("plan lstm --rank 1e400", "plan: --rank=inf: a float is a share of the full rank, in (0, 1)\n"),
        ("plan lstm --rank inf", "plan: --rank=inf: a float is a share of the full rank, in (0, 1)\n"),
        ("plan lstm --rank 1e300", "plan: --rank=1e+300: a float is a share of the full rank, in (0, 1)\n"),
        ("plan lstm --rank energy:1e400", "plan: Energy: inf is not between 0 and 1"),
        ("plan lstm --rank budget:params=1e400", "plan: Budget: give exactly one of params="),
        ("plan lstm --override *=1e400", "rank=inf: a float is a share of the full rank, in (0, 1)\n"),
        ("bench digits --tune lr=99999999999999999999", "bench: --tune lr=99999999999999999999: expected a number"),
        ("bench digits --methods dense@sgd=1e400 --out {out}", "bench: Recipe: lr=inf must be a positive number"),
        ("bench digits --workers 0 --out {out}", "bench: --per-host 0: must be at least 1"),
        ("convert x.pt --plan {broken} --out y.pt", "broken.json: not a plan: text:1: not valid JSON: "),
        ("report {broken_run}", "run.json:1: not valid JSON: "),
    ],
)  # fmt: skip
def test_absurd_input_is_one_line(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    for file in ("broken.json", "run/run.json"):
        (tmp_path / file).write_text("[")
    places = {"out": tmp_path / "out", "broken": tmp_path / "broken.json", "broken_run": tmp_path / "run"}
    assert main(line.format(**places).split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
