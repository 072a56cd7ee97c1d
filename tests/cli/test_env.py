"""`pufferfish env`, and completion in a shell."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pufferfish.cli import main


def test_a_bug_report_has_versions_and_names_no_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUFFERFISH_DATA", "/home/someone/data")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for part in (f"torch {torch.__version__}", "variables OMP_NUM_THREADS=3", "safetensors 0"):
        assert part in words
    for place in ("/", platform.node(), str(Path.home())):
        assert place not in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pufferfish me", ["merge ", "methods "]),
        ("pufferfish plan --me", ["--measure "]),
        ("pufferfish train digits --device c", ["cpu ", "cuda "]),
    ],
)
def test_completion(line: str, expected: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    found = tmp_path / "found"
    variables = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SHELL": "bash",
    }  # fmt: skip
    command = [sys.executable, "-c", "import sys; from pufferfish.cli import main; sys.exit(main())"]
    subprocess.run(command, env=os.environ | variables, check=False, timeout=60)
    assert [*map(str.strip, found.read_text().split("\n"))] == [*map(str.strip, expected)]
