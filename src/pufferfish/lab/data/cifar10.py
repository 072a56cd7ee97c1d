"""CIFAR-10 in its official binary version: a record is a label and the red, green and blue planes of an image."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .dataset import Dataset, Download, Found

_BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)]
_RECORD = 1 + 3 * 32 * 32

DATASET = Dataset(
    name="cifar10",
    files={name: (name,) for name in [*_BATCHES, "test_batch.bin"]},
    archives=("cifar-10-binary.tar.gz",),
    downloads=(
        Download(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            file="cifar-10-binary.tar.gz",
            size=170_052_171,
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
)


def images(files: dict[str, Found], test: bool = False) -> tuple[Tensor, Tensor]:
    """Bytes (n, 32, 32, 3) and labels."""
    rows = np.concatenate([_records(files[name]) for name in (["test_batch.bin"] if test else _BATCHES)])
    pixels = np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return torch.from_numpy(pixels), torch.from_numpy(rows[:, 0].astype(np.int64))


def _records(file: Found) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    rest = len(file.data) % _RECORD
    if rest or not file.data:
        raise ValueError(
            f"{file.where}: {len(file.data):,} bytes are no whole records of {_RECORD:,}; get it again"
        )
    rows = np.frombuffer(file.data, np.uint8).reshape(-1, _RECORD)
    worst = int(rows[:, 0].max())
    if worst > 9:
        raise ValueError(
            f"{file.where}: it has a label {worst}, but labels go from 0 to 9; this is not CIFAR-10"
        )
    return rows
