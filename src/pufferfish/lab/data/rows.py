"""`Rows`: batches from a tuple of tensors or from a map-style `torch.utils.data.Dataset`."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate


class Rows:
    """Rows of a data set, read as batches. Tensors are copied once to every device that uses them.

    Args:
        source: a tuple of tensors or arrays of equal length, or a map-style dataset whose items are tuples.

    >>> rows = Rows((torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])))
    >>> len(rows), rows.batch(torch.tensor([1, 3]))
    (4, (tensor([[2., 3.],
            [6., 7.]]), tensor([1, 1])))
    """

    def __init__(self, source: Any) -> None:
        parts = source.tensors if isinstance(source, TensorDataset) else source
        self._tensors: dict[torch.device, Sequence[Tensor]] = {}
        if isinstance(parts, tuple | list) and parts and all(isinstance(x, Tensor | ndarray) for x in parts):
            lengths = [len(x) for x in parts]
            if len(set(lengths)) > 1:
                raise ValueError(f"its tensors have {' and '.join(f'{n:,}' for n in lengths)} rows")
            self._length = lengths[0]
            self._tensors[torch.device("cpu")] = [torch.as_tensor(x).cpu() for x in parts]
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, tuple):
            self._length = len(source)
        else:
            raise ValueError(
                f"it is of type {type(source).__name__}, neither a tuple of tensors nor a Dataset"
            )
        self._source = source

    def __len__(self) -> int:
        return self._length

    @property
    def in_memory(self) -> bool:
        """Whether the rows are tensors, which are indexed on the device."""
        return bool(self._tensors)

    def batch(self, rows: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """The rows of these numbers, as tensors on `device`."""
        if not self.in_memory:
            items = [self._source[i] for i in rows.tolist()]
            if not isinstance(items[0], tuple | list):
                raise ValueError(f"its rows are of type {type(items[0]).__name__}, not tuples")
            return tuple(x.to(device) for x in default_collate(items))
        device = torch.device(device)
        if device not in self._tensors:
            self._tensors[device] = [x.to(device) for x in self._tensors[torch.device("cpu")]]
        return tuple(x[rows] for x in self._tensors[device])
