"""CIFAR-10 in its binary version: each record is a label and the red, green and blue planes of an image."""

import numpy as np
import torch
from torch import Tensor

from .dataset import DataFile, Dataset, Download

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


def read_images(files: dict[str, DataFile], test: bool = False) -> tuple[Tensor, Tensor]:
    """Images as bytes (n, 32, 32, 3), and labels (n,)."""
    rows = np.concatenate([_records(files[name]) for name in (["test_batch.bin"] if test else _BATCHES)])
    pixels = np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return torch.from_numpy(pixels), torch.from_numpy(rows[:, 0].astype(np.int64))


def _records(file: DataFile) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    if len(file.data) % _RECORD or not file.data:
        raise ValueError(
            f"{file.path}: {len(file.data):,} bytes are not a multiple of the record size {_RECORD:,}; download it again"
        )
    rows = np.frombuffer(file.data, np.uint8).reshape(-1, _RECORD)
    largest = int(rows[:, 0].max())
    if largest > 9:
        raise ValueError(f"{file.path}: label {largest} is not between 0 and 9; this is not a CIFAR-10 file")
    return rows
