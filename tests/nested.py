"""Containers in containers, of tensors and other values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def equal(a: Any, b: Any, at: str = "") -> None:
    """Same structure, same bits."""
    assert type(a) is type(b), at
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, at
        assert a.stride() == b.stride(), at
        assert torch.equal(a, b), at
    elif isinstance(a, dict):
        assert set(a) == set(b), at
        for key in a:
            equal(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            equal(x, y, f"{at}/{i}")
    else:
        assert a == b, at
