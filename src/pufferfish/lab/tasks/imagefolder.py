"""`ImageFolder`: folders of images, as of ImageNet, with ResNet-50 or WideResNet-50-2."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..data.batch_order import BatchOrder, steps_per_epoch, uniform
from ..data.dataset import data_folder
from ..data.image_ops import normalize
from ..data.imagefolder import ImageFiles, list_images, prefetch
from ..data.splits import hold_out
from ..models import REFERENCES, resnet50
from .image_classification import ImageClassification
from .recipe import Recipe
from .task import Batch, check_choice


@dataclass(frozen=True)
class ImageFolder(ImageClassification):
    """A data folder with `train` and `val`, each with one folder of images per class.

    As is usual with ImageNet, `val` is the test split, and validation images are held out of `train`. If there is also a
    folder `test`, that is the test split and `val` is for validation.
    """

    name = "imagefolder"
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    flip = True
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "paper": Recipe(
            epochs=90, batch=256, lr=0.1, schedule="steps", milestones=(30 / 90, 60 / 90, 80 / 90),
            weight_decay=1e-4, label_smoothing=0.1, switch_at=10,
        ),
        "short": Recipe(
            epochs=18, batch=1024, lr=2.0, warm_up=0.1, nesterov=True, weight_decay=5e-5, label_smoothing=0.1, switch_at=4,
        ),
    }  # fmt: skip

    model: str = "resnet50"  # or "wide_resnet50_2"
    classes: int = 1000  # number of classes
    size: int = 224  # height and width of the model's input
    held: float = 0.02  # fraction of the training images that is held out for validation

    def __post_init__(self) -> None:
        check_choice(self.name, "model", self.model, ("resnet50", "wide_resnet50_2"))
        if not 0 < self.held < 1:
            raise ValueError(f"imagefolder: held={self.held} must be a fraction between 0 and 1")

    @property
    def keep(self) -> Sequence[str]:
        return REFERENCES[self.model].keep

    def build(self, width: float = 1.0) -> nn.Module:
        return resnet50(classes=self.classes, wide=2 if self.model == "wide_resnet50_2" else 1, width=width)

    def load(self, folder: Path | None) -> dict[str, ImageFiles]:
        content = "train/CLASS/*.jpg and val/CLASS/*.jpg"
        root = data_folder(folder, self.name, f"a folder with {content}")
        for name in ("train", "val"):
            if not (root / name).is_dir():
                raise ValueError(f"imagefolder: {root} has no folder {name}; it needs {content}")
        train, classes = list_images(root / "train")
        if len(classes) > self.classes:
            raise ValueError(
                f"{root / 'train'} has {len(classes):,} classes; use imagefolder:{self.model},classes={len(classes)}"
            )
        val, _ = list_images(root / "val", classes)
        if (root / "test").is_dir():
            return {"train": train, "valid": val, "test": list_images(root / "test", classes)[0]}
        n = len(train.paths)
        rest, held = hold_out(n, max(1, int(self.held * n)))
        return {"train": train.select(rest), "valid": train.select(held), "test": val}

    def steps(self, data: dict[str, ImageFiles], batch: int) -> int:
        return steps_per_epoch(len(data["train"].paths), batch, "training images")

    def epoch(self, data: Any, order: BatchOrder) -> Iterator[Batch]:
        files: ImageFiles = data[order.split]
        n = len(files.paths)
        batches = order.batches(n, "training images", device="cpu")
        draws = uniform((n, 5), order.generator).cpu() if order.training else None
        shards = [order.shard(batch) for batch in batches]
        crops = (
            [(files.paths[i], None if draws is None else draws[i, :4].tolist()) for i in rows.tolist()]
            for rows in shards
        )
        for rows, pixels in zip(shards, prefetch(crops, self.size), strict=True):
            images = normalize(pixels.to(order.device), self.mean, self.std)
            if draws is not None:
                flips = (draws[rows, 4] < 0.5).to(order.device)
                images = torch.where(flips[:, None, None, None], images.flip(3), images)
            yield images, files.labels[rows].to(order.device)
