"""What every test shares: skipping what needs a GPU, and reproducible examples."""

import pytest
import torch
from hypothesis import settings

# The same examples on every run; a loaded machine must not fail a test for being slow.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
