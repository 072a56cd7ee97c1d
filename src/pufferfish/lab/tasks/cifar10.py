"""CIFAR-10: ResNet-18 or VGG-19."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..data.cifar10 import DATASET, images
from ..data.dataset import read
from ..data.order import Splits, held_out
from ..models import REFERENCES
from .classify import Classify
from .task import Recipe, known


@dataclass(frozen=True)
class Cifar10(Classify):
    """The paper's image task.

    Args:
        model: "resnet18" or "vgg19".
        held: training images held out for validation; with 0 all 50,000 are trained on and there is no "valid".

    >>> Cifar10("vgg19").recipe("paper").switch_at
    80
    """

    name = "cifar10"
    dataset = DATASET
    mean, std = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
    shift = 4
    mirror = True

    model: str = "resnet18"
    held: int = 1000

    def __post_init__(self) -> None:
        known(self.name, "model", self.model, ("resnet18", "vgg19"))

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

    def build(self) -> nn.Module:
        return REFERENCES[self.model].build()

    def load(self, folder: Path | None) -> Splits:
        files = read(DATASET, folder)
        pixels, labels = images(files)
        train, valid = held_out(len(labels), self.held)
        splits = {"train": (pixels[train], labels[train]), "test": images(files, test=True)}
        return Splits(splits | ({"valid": (pixels[valid], labels[valid])} if self.held else {}))
