"""Shared by all tests: CPU features, signals, GPUs and reproducible examples."""

import gc
import signal

import pytest
import torch
from hypothesis import settings

from pufferfish.cli.amx import avoid_broken_amx

# The same examples on every run; a loaded machine must not fail a test for being slow.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")

# The tensors here are tiny: a second thread only waits, twenty times as long on a busy machine.
torch.set_num_threads(1)

# Before the first bf16 product; processes that tests start inherit it.
AMX = avoid_broken_amx()

# A shell ignores SIGINT in background jobs, and their children inherit that; some tests press ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    return [AMX] if AMX else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if vars(getattr(item, "module", None) or object).keys() & {"in_processes", "forked", "subprocess"}:
            item.add_marker("processes")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    # Every switch collects garbage and looks at all live objects: without those of modules and earlier tests that takes
    # a tenth of the time.
    gc.freeze()
