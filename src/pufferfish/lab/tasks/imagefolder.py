"""Any ImageNet-style folder: ResNet-50 or WideResNet-50-2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.dataset import data_folder
from ..data.imagefolder import Files, ahead, listed
from ..data.images import scaled
from ..data.order import Epoch, drawn, held_out, steps
from ..models import REFERENCES, resnet50
from .classify import Classify
from .task import Batch, Recipe, known


@dataclass(frozen=True)
class ImageFolder(Classify):
    """A folder with `train` and `val` in it, and in each a folder of images for each class.

    `val` is for the test, as is usual with ImageNet, and validation images are held out of `train`; where there is a `test`
    too, `val` is for validation.

    Args:
        model: "resnet50" or "wide_resnet50_2".
        classes: how many there are.
        size: of the images that the model sees.
        held: share of the training images that is held out for validation.
    """

    name = "imagefolder"
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    mirror = True

    model: str = "resnet50"
    classes: int = 1000
    size: int = 224
    held: float = 0.02

    def __post_init__(self) -> None:
        known(self.name, "model", self.model, ("resnet50", "wide_resnet50_2"))
        if not 0 < self.held < 1:
            raise ValueError(f"imagefolder: held={self.held}: it is a share between 0 and 1")

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        paper = Recipe(
            epochs=90, batch=256, lr=0.1, schedule="steps", milestones=(30 / 90, 60 / 90, 80 / 90),
            weight_decay=1e-4, label_smoothing=0.1, switch_at=10,
        )  # fmt: skip
        short = Recipe(
            epochs=18,
            batch=1024,
            lr=2.0,
            warm_up=0.1,
            nesterov=True,
            weight_decay=5e-5,
            label_smoothing=0.1,
            switch_at=4,
        )
        return {"paper": paper, "short": short}

    @property
    def keep(self) -> Sequence[str]:
        return REFERENCES[self.model].keep

    def build(self) -> nn.Module:
        return resnet50(classes=self.classes, wide=2 if self.model == "wide_resnet50_2" else 1)

    def load(self, folder: Path | None) -> dict[str, Files]:
        root = data_folder(folder, self.name, "a folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
        for name in ("train", "val"):
            if not (root / name).is_dir():
                raise ValueError(
                    f"imagefolder: {root} has no folder {name}; it needs train/CLASS/*.jpg and val/CLASS/*.jpg"
                )
        train, classes = listed(root / "train")
        if len(classes) > self.classes:
            raise ValueError(
                f"{root / 'train'} has {len(classes):,} classes; write imagefolder:{self.model},classes={len(classes)}"
            )
        val, _ = listed(root / "val", classes)
        if (root / "test").is_dir():
            return {"train": train, "valid": val, "test": listed(root / "test", classes)[0]}
        n = len(train.paths)
        rest, held = held_out(n, max(1, int(self.held * n)))
        return {"train": train.some(rest), "valid": train.some(held), "test": val}

    def steps(self, data: dict[str, Files], batch: int) -> int:
        return steps(len(data["train"].paths), batch, "training images")

    def epoch(self, data: Any, of: Epoch) -> Iterator[Batch]:
        files: Files = data[of.split]
        n = len(files.paths)
        order = of.order(n, "training images", device="cpu")
        draws = drawn((n, 5), of.generator).cpu() if of.training else None
        mine = [of.share(rows) for rows in order]
        work = (
            [(files.paths[i], None if draws is None else draws[i, :4].tolist()) for i in rows.tolist()]
            for rows in mine
        )
        for rows, pixels in zip(mine, ahead(work, self.size), strict=True):
            images = scaled(pixels.to(of.device), self.mean, self.std)
            if draws is not None:
                mirrored = (draws[rows, 4] < 0.5).to(of.device)
                images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
            yield images, files.labels[rows].to(of.device)
