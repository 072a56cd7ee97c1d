"""The files of benchmarks/ as modules, for tests that run their short forms."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """benchmarks/`name`.py, executed once. What it imports from there has to be asked for before.

    Without that folder, as beside an installed wheel, the module that asks for it is skipped.
    """
    if name not in sys.modules:
        if not FOLDER.is_dir():
            pytest.skip("benchmarks/ is not beside the tests", allow_module_level=True)
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look their annotations up
        spec.loader.exec_module(module)
    return sys.modules[name]
