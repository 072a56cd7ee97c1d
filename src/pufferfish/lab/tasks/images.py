"""`ImageClassification`: base class of tasks that classify images; `ImageFolder`: folders of images with ResNet-50."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import (
    BatchOrder,
    Device,
    hold_out,
    steps_per_epoch,
    uniform,
)
from ..data.dataset import data_folder
from ..models import REFERENCES, resnet50
from .task import Batch, Recipe, Task, eval_mode


class ImageClassification(Task):
    """Image classification with cross-entropy. The data is `Splits` of byte images (n, h, w, c) and labels."""

    metric = "accuracy"
    #: Mean and standard deviation of the bytes, per channel.
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    #: Augmentation: maximum shift in pixels, and whether to flip horizontally at random.
    shift: ClassVar[int] = 0
    flip: ClassVar[bool] = False
    cutout: int = 0  # side of a square in pixels that is hidden at a random place of each training image

    def steps(self, data: Any, batch: int) -> int:
        return steps_per_epoch(data.size("train"), batch, "training images")

    def epoch(self, data: Any, order: BatchOrder) -> Iterator[Batch]:
        pixels, labels = data.on(order.split, order.device)
        n = len(labels)
        batches = order.batches(n, "training images")
        if (
            order.training
        ):  # draw all random numbers before the first batch, so that a resumed epoch has the same
            shifts = (uniform((2, n), order.generator) * (2 * self.shift + 1)).long() - self.shift
            flips = uniform(n, order.generator) < (0.5 if self.flip else 0.0)
            shifts, flips = shifts.to(order.device), flips.to(order.device)
            if self.cutout:
                sides = torch.tensor(pixels.shape[1:3])[:, None]
                squares = (uniform((2, n), order.generator) * sides).long().to(order.device)
        for batch in batches:
            rows = order.shard(batch)
            if order.training:
                images = shift_and_flip(pixels, rows, shifts[0, rows], shifts[1, rows], flips[rows])
            else:
                images = pixels[rows]
            images = normalize(images, self.mean, self.std)
            if order.training and self.cutout:
                cut_out_(images, self.cutout, *squares[:, rows])
            yield images, labels[rows]

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=recipe.label_smoothing)

    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: Device = "cpu", batch: int = 1000
    ) -> dict[str, float]:
        correct, loss, count = torch.zeros((), device=device), torch.zeros((), device=device), 0
        with eval_mode(model) as module:
            for images, labels in self.batches(data, split, batch, device=device):
                logits = module(images).float()
                correct += (logits.argmax(1) == labels).sum()
                loss += F.cross_entropy(logits, labels, reduction="sum")
                count += len(labels)
        if not count:
            raise ValueError(f"{self.name}: the split {split!r} is empty")
        return {"accuracy": 100 * float(correct) / count, "loss": float(loss) / count}


SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")
Images = list[tuple[Path, int]]  # files and the numbers of their classes


@dataclass(frozen=True)
class ImageFolder(ImageClassification):
    """A data folder with `train` and `val`, the test split, each with one folder of images per class."""

    name = "imagefolder"
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    keep = REFERENCES["resnet50"].keep
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "paper": Recipe(
            epochs=90, batch=256, lr=0.1, schedule="steps", milestones=(30 / 90, 60 / 90, 80 / 90),
            weight_decay=1e-4, label_smoothing=0.1, switch_at=10,
        ),
        "short": Recipe(
            epochs=18, batch=1024, lr=2.0, warm_up=0.1, nesterov=True, weight_decay=5e-5, label_smoothing=0.1, switch_at=4,
        ),
    }  # fmt: skip

    classes: int = 1000  # number of classes
    size: int = 224  # height and width of the model's input
    held: float = 0.02  # fraction of the training images that is held out for validation

    def build(self, width: float = 1.0) -> nn.Module:
        return resnet50(classes=self.classes, width=width)

    def load(self, folder: Path | None) -> dict[str, Images]:
        root = data_folder(folder, self.name, "a folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
        (train, classes), (val, others) = (list_images(root / name) for name in ("train", "val"))
        if different := sorted({*classes} ^ {*others}):
            raise ValueError(f"{root}: train and val have different classes ({', '.join(different[:3])}…)")
        if len(classes) > self.classes:
            raise ValueError(f"{root} has {len(classes):,} classes; use imagefolder:classes={len(classes)}")
        parts = hold_out(len(train), max(1, int(self.held * len(train))))
        rest, held = ([train[i] for i in rows.tolist()] for rows in parts)
        return {"train": rest, "valid": held, "test": val}

    def steps(self, data: dict[str, Images], batch: int) -> int:
        return steps_per_epoch(len(data["train"]), batch, "training images")

    def epoch(self, data: Any, order: BatchOrder) -> Iterator[Batch]:
        files: Images = data[order.split]
        batches = order.batches(len(files), "training images", device="cpu")
        draws = uniform((len(files), 5), order.generator).cpu() if order.training else None
        pending: deque[tuple[list[int], Iterator[Tensor]]] = deque()  # a batch ahead
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            for batch in (*batches, None):
                if batch is not None:
                    rows = order.shard(batch).tolist()
                    crops = [None] * len(rows) if draws is None else draws[rows, :4].tolist()
                    paths, sizes = [files[i][0] for i in rows], [self.size] * len(rows)
                    pending.append((rows, pool.map(decode, paths, sizes, crops)))
                if len(pending) > (batch is not None):
                    rows, decoded = pending.popleft()
                    empty = torch.zeros(0, self.size, self.size, 3, dtype=torch.uint8)
                    pixels = torch.stack(list(decoded)) if rows else empty
                    images = normalize(pixels.to(order.device), self.mean, self.std)
                    if draws is not None:
                        flips = (draws[rows, 4] < 0.5).to(order.device)
                        images = torch.where(flips[:, None, None, None], images.flip(3), images)
                    yield images, torch.tensor([files[i][1] for i in rows], device=order.device)


def list_images(folder: Path) -> tuple[Images, list[str]]:
    """Images below `folder`, and the names of its classes, in alphabetical order."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = [
        [p for p in sorted((folder / name).rglob("*")) if p.suffix.lower() in SUFFIXES] for name in names
    ]
    if not names or not all(found):
        raise ValueError(f"{folder}: it needs one folder of images ({', '.join(SUFFIXES)}) per class")
    return [(path, label) for label, paths in enumerate(found) for path in paths], names


def decode(path: Path, size: int, draws: Sequence[float] | None) -> Tensor:
    """Decode an image to bytes (size, size, 3): its central square, or a crop of random area, shape and position."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            (width, height), x, y = image.size, 0.5, 0.5
            w = h = min(width, height) * 7 / 8
            if draws is not None:
                area, shape, x, y = draws  # from 0 to 1
                pixels = width * height * (0.08 + 0.92 * area)  # 8 to 100 % of it
                ratio = math.exp((2 * shape - 1) * math.log(4 / 3))  # 3:4 to 4:3
                w, h = min(math.sqrt(pixels * ratio), width), min(math.sqrt(pixels / ratio), height)
            left, top = x * (width - w), y * (height - h)
            box = left, top, min(left + w, width), min(top + h, height)
            resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
            return torch.from_numpy(np.array(resized))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: not a readable image ({error})") from None


def shift_and_flip(pixels: Tensor, rows: Tensor, down: Tensor, right: Tensor, flip: Tensor) -> Tensor:
    """Select `rows` of images (n, h, w, c), shift each with reflection padding, then flip some horizontally.

    `down`, `right` (in pixels) and `flip` have one entry for each of `rows`.

    >>> line = torch.tensor([1, 2, 3, 4]).view(1, 1, 4, 1)
    >>> one = torch.tensor([1])
    >>> shift_and_flip(line, 0 * one, 0 * one, one, one < 0).flatten().tolist()
    [2, 1, 2, 3]
    """
    _, h, w, _ = pixels.shape
    y = _reflect(torch.arange(h, device=pixels.device) - down[:, None], h)
    x = _reflect(torch.arange(w, device=pixels.device) - right[:, None], w)
    x = torch.where(flip[:, None], x.flip(1), x)
    return pixels[rows[:, None, None], y[:, :, None], x[:, None, :]]


def normalize(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Convert bytes (n, h, w, c) to normalized floats (n, c, h, w) in channels-last memory format."""
    return ((pixels - _constant(mean, pixels.device)) / _constant(std, pixels.device)).permute(0, 3, 1, 2)


def cut_out_(images: Tensor, size: int, down: Tensor, right: Tensor) -> Tensor:
    """Set a square of each image (n, c, h, w) in place to 0, the mean of normalized images: Cutout (arXiv:1708.04552).

    `down` and `right` have the middle of each square, in pixels; a part of it may lie outside of the image.

    >>> one = torch.tensor([1])
    >>> cut_out_(torch.ones(1, 1, 1, 5), 2, 0 * one, one).flatten().tolist()
    [0.0, 0.0, 1.0, 1.0, 1.0]
    """
    h, w = images.shape[2:]
    rows = torch.arange(h, device=images.device) - down[:, None] + size // 2
    columns = torch.arange(w, device=images.device) - right[:, None] + size // 2
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None, :]
    return images.masked_fill_(inside[:, None], 0.0)


def _reflect(index: Tensor, n: int) -> Tensor:
    """Reflect indices outside of 0 … n-1 at the border."""
    return (n - 1) - ((n - 1) - index.abs()).abs()


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Tensor on the device, cached because each copy would synchronize with the device."""
    return torch.tensor(values, device=device)
