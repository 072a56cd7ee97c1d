"""`Splits`: the tensors of each split of a data set."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Splits:
    """Tensors of each split, copied once to every device that uses them.

    >>> data = Splits({"train": (torch.zeros(4, 2), torch.zeros(4))})
    >>> [tuple(x.shape) for x in data.on("train", "cpu")]
    [(4, 2), (4,)]
    """

    def __init__(self, splits: Mapping[str, tuple[Tensor, ...]]) -> None:
        self._splits = dict(splits)
        self._copies: dict[tuple[str, torch.device], tuple[Tensor, ...]] = {}

    def on(self, split: str, device: torch.device | str) -> tuple[Tensor, ...]:
        """Tensors of `split` on `device`."""
        if split not in self._splits:
            raise ValueError(f"split {split!r} does not exist; choose from {', '.join(self._splits)}")
        key = split, torch.device(device)
        if key not in self._copies:
            self._copies[key] = tuple(x.to(device) for x in self._splits[split])
        return self._copies[key]

    def size(self, split: str) -> int:
        """Number of rows in `split`."""
        return len(self.on(split, "cpu")[0])


def hold_out(n: int, held: int) -> tuple[Tensor, Tensor]:
    """Split `n` row indices into training and `held` for validation, the same in every run on every machine.

    >>> train, valid = hold_out(10, 3)
    >>> len(train), len(valid), sorted(train.tolist() + valid.tolist()) == list(range(10))
    (7, 3, True)
    """
    if not 0 <= held < n:
        raise ValueError(f"cannot hold out {held:,} of {n:,} rows")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return order[held:].sort().values, order[:held].sort().values
