"""`to_columns` and `to_windows`: a sequence of tokens as parallel columns, or as windows."""

from torch import Tensor


def to_columns(tokens: Tensor, n: int) -> Tensor:
    """Reshape a sequence to `n` columns of equal length (time, n); the remainder is dropped.

    >>> import torch
    >>> to_columns(torch.arange(7), 2).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    rows = len(tokens) // n
    if rows < 2:
        raise ValueError(f"a text of {len(tokens):,} tokens is too short for {n} columns")
    return tokens[: rows * n].view(n, rows).t().contiguous()


def to_windows(tokens: Tensor, length: int, first: int = 0) -> Tensor:
    """View of consecutive windows of `length` tokens, each with the token that follows it, starting at `first`.

    >>> import torch
    >>> to_windows(torch.arange(8), 3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if len(tokens) - first <= length:
        raise ValueError(f"a text of {len(tokens):,} tokens is too short for windows of {length:,}")
    return tokens[first:].unfold(0, length + 1, length)
