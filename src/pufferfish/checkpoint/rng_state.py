"""State of the global random number generators of a training run: Python, NumPy, torch and CUDA."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def rng_state(devices: Sequence[torch.device | str] = ()) -> dict[str, Any]:
    """Return the state of the global generators as numbers, text and tensors.

    Args:
        devices: GPUs whose generators are meant, which need not be the current device; none: the current one.

    >>> before = rng_state()
    >>> draw = torch.rand(1), random.random(), np.random.rand()
    >>> set_rng_state(before)
    >>> draw == (torch.rand(1), random.random(), np.random.rand())
    True
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy_state | {"state": numpy_state["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in devices or ["cuda"]]
    return state


def set_rng_state(state: dict[str, Any], devices: Sequence[torch.device | str] = ()) -> None:
    """Restore the generators. CUDA's are left unchanged if they were not saved or no GPU is available."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, value in zip(devices or ["cuda"], state["cuda"], strict=False):
            torch.cuda.set_rng_state(value, device)


def seed_rng(text: str) -> None:
    """Seed all generators with a hash of `text`."""
    digest = hashlib.sha256(text.encode()).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    torch.manual_seed(int.from_bytes(digest[12:20], "big") >> 1)
