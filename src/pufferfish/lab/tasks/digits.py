"""`Digits`: handwritten digits of 8×8 pixels, which train in seconds.

Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998 (CC BY 4.0)."""

import gzip
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data.batches import Splits, hold_out
from ..models.scaled import scaled
from .images import ImageClassification
from .task import Recipe, check_choice


@dataclass(frozen=True)
class Digits(ImageClassification):
    """Handwritten digits of 8×8 pixels; the data is included in the package.

    >>> task = Digits()
    >>> data = task.load(None)
    >>> images, labels = next(task.batches(data, "train", 32, generator=torch.Generator()))
    >>> task.build()(images).shape
    torch.Size([32, 10])
    """

    name = "digits"
    mean, std = (4.9,), (6.0,)
    shift = 1

    model: str = "cnn"  # three convolutions and two linear layers; "mlp": three linear layers
    width: int = 64  # channels of the first convolution; hidden layers have 4 × `width` features
    held: int = 144  # training images held out for validation

    def __post_init__(self) -> None:
        check_choice(self.name, "model", self.model, ("cnn", "mlp"))

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        short = Recipe(
            epochs=12, batch=64, lr=0.03 if self.model == "cnn" else 0.1, warm_up=0.2, nesterov=True,
            weight_decay=5e-4, label_smoothing=0.1, switch_at=4,
        )  # fmt: skip
        return {"short": short}

    @property
    def keep(self) -> Sequence[str]:
        return ("conv1", "fc2") if self.model == "cnn" else ("fc3",)

    def build(self, width: float = 1.0) -> nn.Module:
        a, b, c = (scaled(factor * self.width, width) for factor in (1, 2, 4))
        sizes: tuple[int, ...] = (64, c, c, 10)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.model == "cnn":
            for i, (inputs, outputs) in enumerate(((1, a), (a, b), (b, c)), start=1):
                layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
                layers[f"bn{i}"] = nn.BatchNorm2d(outputs)
                layers[f"relu{i}"] = nn.ReLU()
                if i > 1:
                    layers[f"pool{i}"] = nn.MaxPool2d(2)
            sizes = (4 * c, c, 10)
        layers["flat"] = nn.Flatten()
        for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            layers[f"fc{i}"] = nn.Linear(inputs, outputs)
            if outputs != 10:
                layers[f"act{i}"] = nn.ReLU()
        return nn.Sequential(layers)

    def load(self, folder: Path | None) -> Splits:
        (x, y), test = digits(), digits(test=True)
        train, valid = hold_out(len(y), self.held)
        splits = {"train": (x[train], y[train]), "valid": (x[valid], y[valid]), "test": test}
        return Splits({name: (_to_bytes(images), labels) for name, (images, labels) in splits.items()})


def _to_bytes(images: Tensor) -> Tensor:
    return (images * 16).round().to(torch.uint8).permute(0, 2, 3, 1)


def digits(test: bool = False) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) with values from 0 to 1, and labels (n,). The test split is every fifth digit.

    >>> [tuple(x.shape) for x in (*digits(), *digits(test=True))]
    [(1438, 1, 8, 8), (1438,), (359, 1, 8, 8), (359,)]
    """
    text = gzip.decompress(files("pufferfish.lab.data").joinpath("digits.csv.gz").read_bytes()).decode()
    rows = torch.from_numpy(np.loadtxt(text.splitlines(), delimiter=",", dtype=np.int64))
    in_test = torch.arange(len(rows)) % 5 == 4
    rows = rows[in_test if test else ~in_test]
    return rows[:, :64].view(-1, 1, 8, 8) / 16, rows[:, 64]
