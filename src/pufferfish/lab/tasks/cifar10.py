"""`Cifar10`: CIFAR-10 with ResNet-18 or VGG-19."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..data.batches import Splits, hold_out
from ..data.cifar10 import DATASET, read_images
from ..data.dataset import read_files
from ..models import REFERENCES
from .image_classification import ImageClassification
from .recipe import Recipe
from .task import check_choice


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
