"""`shift_and_flip`, `normalize` and `cut_out_`: operations on batches of images, on their device."""

from functools import cache

import torch
from torch import Tensor


def shift_and_flip(pixels: Tensor, rows: Tensor, down: Tensor, right: Tensor, flip: Tensor) -> Tensor:
    """Select `rows` of images (n, h, w, c), shift each with reflection padding, then flip some horizontally.

    `down`, `right` (in pixels) and `flip` have one entry for each of `rows`.

    >>> line = torch.tensor([1, 2, 3, 4]).view(1, 1, 4, 1)
    >>> one = torch.tensor([1])
    >>> shift_and_flip(line, 0 * one, 0 * one, one, one < 0).flatten().tolist()
    [2, 1, 2, 3]
    """
    _, h, w, _ = pixels.shape
    y = _reflect(torch.arange(h, device=pixels.device) - down[:, None], h)
    x = _reflect(torch.arange(w, device=pixels.device) - right[:, None], w)
    x = torch.where(flip[:, None], x.flip(1), x)
    return pixels[rows[:, None, None], y[:, :, None], x[:, None, :]]


def normalize(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Convert bytes (n, h, w, c) to normalized floats (n, c, h, w) in channels-last memory format."""
    return ((pixels - _constant(mean, pixels.device)) / _constant(std, pixels.device)).permute(0, 3, 1, 2)


def cut_out_(images: Tensor, size: int, down: Tensor, right: Tensor) -> Tensor:
    """Set a square of each image (n, c, h, w) in place to 0, the mean of normalized images: Cutout (arXiv:1708.04552).

    `down` and `right` have the middle of each square, in pixels; a part of it may lie outside of the image.

    >>> one = torch.tensor([1])
    >>> cut_out_(torch.ones(1, 1, 1, 5), 2, 0 * one, one).flatten().tolist()
    [0.0, 0.0, 1.0, 1.0, 1.0]
    """
    h, w = images.shape[2:]
    rows = torch.arange(h, device=images.device) - down[:, None] + size // 2
    columns = torch.arange(w, device=images.device) - right[:, None] + size // 2
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None, :]
    return images.masked_fill_(inside[:, None], 0.0)


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Tensor on the device, cached because each copy would synchronize with the device."""
    return torch.tensor(values, device=device)


def _reflect(index: Tensor, n: int) -> Tensor:
    """Reflect indices outside of 0 … n-1 at the border."""
    return (n - 1) - ((n - 1) - index.abs()).abs()
