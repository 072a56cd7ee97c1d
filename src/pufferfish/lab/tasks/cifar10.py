"""`Cifar10`: CIFAR-10 with ResNet-18 or VGG-19."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data.batches import Splits, hold_out
from ..data.dataset import DataFile, Dataset, Download, read_files
from ..models import REFERENCES
from .images import ImageClassification
from .task import Recipe, check_choice

_BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)]

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


@dataclass(frozen=True)
class Cifar10(ImageClassification):
    """CIFAR-10, the paper's image task.

    >>> Cifar10("vgg19").recipe("paper").switch_at
    80
    """

    name = "cifar10"
    dataset = DATASET
    mean, std = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
    shift = 4
    flip = True

    model: str = "resnet18"  # or "vgg19"
    held: int = 1000  # training images held out for validation; 0 uses all 50,000, without a "valid" split
    cutout: int = 0  # side of a square in pixels that is hidden in each training image

    def __post_init__(self) -> None:
        check_choice(self.name, "model", self.model, ("resnet18", "vgg19"))
        if not 0 <= self.cutout <= 32:
            raise ValueError(f"cifar10: cutout={self.cutout} must be between 0 and 32")

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        paper = Recipe(
            epochs=300, batch=128, lr=0.1, schedule="steps", milestones=(150 / 300, 250 / 300),
            weight_decay=1e-4, decay_vectors=True, switch_at=80,
        )  # fmt: skip
        short = Recipe(
            epochs=30, batch=512, lr=0.4 if self.model == "resnet18" else 0.1, warm_up=0.2, nesterov=True,
            weight_decay=5e-4, label_smoothing=0.1, switch_at=10,
        )  # fmt: skip
        return {"paper": paper, "short": short}

    @property
    def keep(self) -> Sequence[str]:
        return REFERENCES[self.model].keep

    def build(self, width: float = 1.0) -> nn.Module:
        return REFERENCES[self.model].build(width=width)

    def load(self, folder: Path | None) -> Splits:
        files = read_files(DATASET, folder)
        pixels, labels = read_images(files)
        train, valid = hold_out(len(labels), self.held)
        splits = {"train": (pixels[train], labels[train]), "test": read_images(files, test=True)}
        return Splits(splits | ({"valid": (pixels[valid], labels[valid])} if self.held else {}))


_RECORD = 1 + 3 * 32 * 32


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
