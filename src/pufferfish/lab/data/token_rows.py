"""Text as a row of numbers: cut into columns that go on from batch to batch, or into windows."""

from __future__ import annotations

from torch import Tensor


def columns(tokens: Tensor, n: int) -> Tensor:
    """The text in `n` columns of equal length, side by side (time, n); what does not fill a row is left out.

    >>> import torch
    >>> columns(torch.arange(7), 2).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    rows = len(tokens) // n
    if rows < 2:
        raise ValueError(f"a text of {len(tokens):,} tokens is too short for {n} columns")
    return tokens[: rows * n].view(n, rows).t().contiguous()


def windows(tokens: Tensor, length: int, first: int = 0) -> Tensor:
    """All windows of `length` tokens and the one after, one beginning where the other ends, from `first` on.

    >>> import torch
    >>> windows(torch.arange(8), 3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if len(tokens) - first <= length:
        raise ValueError(f"a text of {len(tokens):,} tokens is too short for windows of {length:,}")
    return tokens[first:].unfold(0, length + 1, length)
