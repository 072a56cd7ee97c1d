"""Images as bytes on the device: taken, shifted, mirrored and scaled there."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def moved(pixels: Tensor, rows: Tensor, down: Tensor, right: Tensor, mirror: Tensor) -> Tensor:
    """The images `rows` of `pixels` (n, h, w, c), each moved by a few pixels and mirrored or not.

    What comes in over an edge is what lies inside it, reflected. The other tensors have an element for each of
    `rows`.

    >>> line = torch.tensor([1, 2, 3, 4]).view(1, 1, 4, 1)
    >>> moved(line, torch.tensor([0]), torch.tensor([0]), torch.tensor([1]), torch.tensor([False])).flatten().tolist()
    [2, 1, 2, 3]
    """
    _, h, w, _ = pixels.shape
    y = _reflected(torch.arange(h, device=pixels.device) - down[:, None], h)
    x = _reflected(torch.arange(w, device=pixels.device) - right[:, None], w)
    x = torch.where(mirror[:, None], x.flip(1), x)
    return pixels[rows[:, None, None], y[:, :, None], x[:, None, :]]


def scaled(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(n, h, w, c) bytes to (n, c, h, w) floats, channels-last in memory."""
    return ((pixels - _there(mean, pixels.device)) / _there(std, pixels.device)).permute(0, 3, 1, 2)


@cache
def _there(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Sent once: each time the device would be waited for."""
    return torch.tensor(values, device=device)


def _reflected(index: Tensor, n: int) -> Tensor:
    """Indices beyond the first or the last come back."""
    return (n - 1) - ((n - 1) - index.abs()).abs()
