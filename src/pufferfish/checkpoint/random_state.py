"""The generators of random numbers that a training run draws from: Python's, numpy's, torch's."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Where the global generators are: numbers, text and tensors.

    >>> before = rng_state()
    >>> draw = torch.rand(1), random.random(), np.random.rand()
    >>> set_rng_state(before)
    >>> draw == (torch.rand(1), random.random(), np.random.rand())
    True
    """
    theirs: Any = np.random.get_state(legacy=False)
    key = theirs["state"]["key"].tolist()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": theirs | {"state": theirs["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators there. CUDA's is left alone where there is none now, or was none then."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_rng(text: str) -> None:
    """Start all of them anew, from a number made of `text`."""
    digest = hashlib.sha256(text.encode()).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    torch.manual_seed(int.from_bytes(digest[12:20], "big") >> 1)
