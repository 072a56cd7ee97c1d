"""Shared by the adapters' tests: no network, no progress bars, a fresh Accelerate state."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
