"""Numbers on the command line: every option refuses what is not a number, is not finite or overflows."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pufferfish.cli import _parser, main
from pufferfish.cli.arguments import number, whole


def test_every_number_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    choices = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    kinds = [action.type for parser in choices.values() for action in parser._actions]
    assert kinds.count(whole) > 20
    assert not {int, float} & {*kinds}  # they accept numbers that overflow, and nan
    assert (whole("-3"), whole(str(2**63 - 1)), number("1e-3"), number("7")) == (-3, 2**63 - 1, 1e-3, 7.0)
    for kind, values in (
        (whole, (str(2**63), "1.5", "9" * 5000)),
        (number, ("1e400", "-inf", "nan", "many", "")),
    ):
        for value in values:
            with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
                kind(value)
    with pytest.raises(SystemExit, match="2"):
        main(["train", "digits", "--epochs", "9" * 5000])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "argument --epochs: '9999" in last
    assert len(last) < 160


def test_a_word_that_an_option_has_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--keep", "conv1", "lstm"])
    said = capsys.readouterr().err
    assert said.startswith(
        "pufferfish plan: the following arguments are required: MODEL; put them before --keep; see `"
    )


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
        ("convert x.pt --plan {broken} --out y.pt", "broken.json: not a plan: not valid JSON: "),
        ("report {broken_run}", "run.json: not valid JSON: "),
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
