"""`import pufferfish` and the command's `--help` do not import torch; a public name does, at its first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pufferfish as pf


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_help_and_version_import_neither_torch_nor_rich() -> None:
    lines = [[], ["--help"], ["--version"], ["plan", "--help"], ["train", "--help"], ["bench", "--help"]]
    code = f"""
import contextlib, io, sys
from pufferfish.cli import main
for line in {lines}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(line)
    assert "pufferfish" in out.getvalue(), line
print(*(name for name in ("torch", "numpy", "rich", "pufferfish.api") if name in sys.modules))
"""
    assert run(code) == "\n"


def test_first_use_of_a_name_imports_all() -> None:
    code = """
import sys
import pufferfish as pf
assert "torch" not in sys.modules
plan = pf.plan
assert "torch" in sys.modules
print(sorted({*pf.__all__} - {*vars(pf)}), pf.planning.plan is plan)
print(*({"accelerate", "lightning", "peft", "pytorch_lightning", "torchft", "transformers"} & {*sys.modules}))
"""
    assert run(code) == "[] True\n\n"


def test_names() -> None:
    assert {*pf.__all__, "__version__"} <= {*dir(pf)}
    with pytest.raises(AttributeError, match="module 'pufferfish' has no attribute 'factorise_'"):
        pf.factorise_  # noqa: B018
