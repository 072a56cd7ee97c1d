"""Tables and progress on a terminal of 80 columns, and plain text elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
import torch
from rich.console import Console
from torch import nn

import pufferfish as pf
from pufferfish.cli import main
from pufferfish.cli.terminal import progress_bars, show
from pufferfish.lab.method_name import method_words
from pufferfish.lab.models import REFERENCES
from pufferfish.planning.text import Table, folded_rows, plan_parts, plan_table, track


def on_terminal(*parts: str | Table, width: int = 80, colour: bool = False) -> str:
    system = "standard" if colour else None
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, color_system=system, highlight=False
    )  # type: ignore[arg-type]
    show(parts, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def numbers(text: str, head: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(head)).split()


@pytest.mark.parametrize("name", REFERENCES)
def test_plans_fit_and_add_up(name: str) -> None:
    with torch.device("meta"):
        plan = pf.plan(REFERENCES[name].build(), 0.25, measure=False)
    text = on_terminal(*plan_parts(plan))
    assert max(map(len, text.splitlines())) <= 80
    tables = [line for line in str(plan).splitlines() if "  " in line]  # text is not wrapped
    assert max(map(len, tables)) <= 80
    assert numbers(text, "parameters") == numbers(plan_table(plan), "parameters")
    rows = folded_rows(plan.entries)
    assert sorted(e.name for row in rows.values() for e in row) == sorted(e.name for e in plan.entries)


def test_equal_blocks_are_one_row() -> None:
    def block(width: int) -> nn.Module:
        return nn.ModuleDict(
            {"q": nn.Linear(64, 64), "experts": nn.Sequential(*(nn.Linear(64, width) for _ in range(3)))}
        )

    model = nn.ModuleDict({"blocks": nn.ModuleList([block(32), block(32), block(48), block(32), block(32)])})
    plan = pf.plan(model, 8, keep=["blocks.4.q"])
    rows = folded_rows(plan.entries)
    assert {name: len(row) for name, row in rows.items()} == {
        "blocks.0–3.q": 4, "blocks.0…4.experts.0–2": 12, "blocks.2.experts.0–2": 3, "blocks.4.q": 1,
    }  # fmt: skip
    table, notes, *_ = map(str, plan_parts(plan))
    head, first, second, *_ = (line.split() for line in table.splitlines())
    assert head == ["layer", "n", "shape", "rank", "weights", "bytes", "note"]
    assert first[:5] == ["blocks.0–3.q", "4", "64×64", "8", "16.4"]  # 4 × 4,096 weights
    assert second[:2] == ["blocks.0…4.experts.0–2", "12"]
    assert notes == "1: kept by pattern 'blocks.4.q'"
    shares = [float(x) for x in re.findall(r"([\d.]+)%", table)]
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert weights == sum(e.before for row in rows.values() for e in row)
    assert sum(shares) == pytest.approx(100 * sum(e.after for e in plan) / plan.after.parameters, abs=0.5)


def test_columns_are_left_out_and_named() -> None:
    table = Table([["layer", "MACs", "weights"], ["x" * 30, "1" * 30, "2" * 30]], left=(0,), spare=("MACs",))
    assert "left out: MACs; --wide shows all" in on_terminal(table)
    assert "\x1b[" not in on_terminal("2.04× smaller")
    assert "\x1b[32m2.04× smaller" in on_terminal("2.04× smaller", colour=True)
    assert "left out" not in on_terminal(table, width=100)
    long = on_terminal(Table([["layer", "n"], ["a.very.long.name." * 8, "1"]], left=(0,)))
    assert max(map(len, long.splitlines())) <= 80
    assert re.sub(r"\s|layer|n$|1$", "", long.partition("\n")[2].replace(" 1", "")) == "a.very.long.name." * 8


def test_bars_show_the_time_left_and_vanish() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress_bars(console):
        for number in track(range(3), "measuring layers"):
            if number == 2:
                break  # as an error would
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "measuring layers" in text
    assert "left" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is shown again


@pytest.mark.slow
def test_methods_on_a_real_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "bf16", "--per-node", "2"]) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("method      error feedback  bits per element  2 workers\nBFloat16()")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    variables = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "pufferfish", "methods"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    seen = b""
    while chunk := _read(ours):
        seen += chunk
    assert process.wait() == 0
    bars, _, text = re.sub(r"\x1b\[1m|\x1b\[0m", "", seen.decode()).rpartition("\x1b[2K")
    assert "compressing a gradient" in bars
    assert {*method_words()} <= {*re.findall(r"\w+", text)}
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\x1b\[\d*3\dm", text)  # no colour


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the process has closed its side
        return b""
