"""`pufferfish env`, and completion in a shell."""

from __future__ import annotations

import json
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
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"].startswith(torch.__version__)
    assert found["variables"].startswith("OMP_NUM_THREADS=3")
    assert "safetensors 0" in found["packages"]
    assert ("none" in found["gpu"]) != torch.cuda.is_available()
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
