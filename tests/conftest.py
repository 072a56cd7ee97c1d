"""What every test shares: skipping what needs a GPU, and reproducible examples."""

import pytest
import torch
from hypothesis import settings

# The same examples on every run; a loaded machine must not fail a test for being slow.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")

# The tensors here are tiny: a second thread only waits, twenty times as long on a busy machine.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
