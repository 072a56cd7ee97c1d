"""What the tests of the report share: a folder of runs, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import METHODS, write_run

from pufferfish.lab.report import report


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    for name in METHODS:
        for seed in range(3):
            write_run(folder / f"{name}-{seed}", name, seed)
    return folder


@pytest.fixture(scope="session")
def html(bench: Path) -> str:
    return report([bench])
