"""Folders of image files, one per class: listed, and decoded by threads while the device computes."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class ImageFiles:
    """Paths of image files and their labels."""

    paths: Sequence[Path]
    labels: Tensor

    def select(self, rows: Tensor) -> ImageFiles:
        """The files at these indices."""
        return ImageFiles([self.paths[i] for i in rows.tolist()], self.labels[rows])


def list_images(folder: Path, classes: Sequence[str] | None = None) -> tuple[ImageFiles, list[str]]:
    """Image files below `folder` and the names of its classes, in alphabetical order; `classes` are the expected names."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if classes is not None and names != list(classes):
        different = sorted(set(names) ^ set(classes))[:3]
        raise ValueError(
            f"{folder}: the classes differ from those of the training images ({', '.join(different)}…)"
        )
    paths, labels = [], []
    for label, name in enumerate(names):
        files = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise ValueError(f"{folder / name}: no images found ({', '.join(IMAGE_SUFFIXES)})")
        paths += files
        labels += [label] * len(files)
    if not paths:
        raise ValueError(f"{folder}: no class folders found; it needs one folder of images per class")
    return ImageFiles(paths, torch.tensor(labels)), names


def decode_image(path: Path, size: int, draws: Sequence[float] | None) -> Tensor:
    """Decode, crop and resize an image to bytes (size, size, 3).

    `draws` are four random numbers between 0 and 1 for `random_crop`; None for `center_crop`.
    """
    try:
        image_module: Any = importlib.import_module("PIL.Image")
    except ImportError:
        raise ImportError("the imagefolder task needs Pillow to read images: pip install pillow") from None
    try:
        with image_module.open(path) as image:
            box = center_crop(*image.size) if draws is None else random_crop(*image.size, *draws)
            resized = image.convert("RGB").resize((size, size), image_module.Resampling.BILINEAR, box=box)
            return torch.from_numpy(np.array(resized))
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        raise ValueError(f"{path}: not a readable image ({error})") from None


def center_crop(width: int, height: int) -> Box:
    """Box of the central square, 7/8 of the shorter side (224 of 256 pixels).

    >>> center_crop(512, 256)
    (144.0, 16.0, 368.0, 240.0)
    """
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_crop(width: int, height: int, area: float, shape: float, across: float, down: float) -> Box:
    """Box of 8 to 100 % of the area, of aspect ratio 3:4 to 4:3, at any position; draws are from 0 to 1.

    >>> random_crop(100, 100, 1.0, 0.5, 0.0, 0.0)
    (0.0, 0.0, 100.0, 100.0)
    """
    pixels = width * height * (0.08 + 0.92 * area)
    ratio = math.exp((2 * shape - 1) * math.log(4 / 3))
    w, h = min(math.sqrt(pixels * ratio), width), min(math.sqrt(pixels / ratio), height)
    left, top = across * (width - w), down * (height - h)
    return left, top, min(left + w, float(width)), min(top + h, float(height))


def prefetch(batches: Iterable[Sequence[Any]], size: int) -> Iterator[Tensor]:
    """Decode batches of (path, draws) to bytes (batch, size, size, 3) with threads, one batch ahead."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        pending: list[list[Future[Tensor]]] = []
        try:
            for images in batches:
                pending.append([pool.submit(decode_image, path, size, draws) for path, draws in images])
                if len(pending) > 1:
                    yield _stack(pending.pop(0), size)
            while pending:
                yield _stack(pending.pop(0), size)
        finally:
            pool.shutdown(cancel_futures=True)  # an epoch may end early


def _stack(futures: list[Future[Tensor]], size: int) -> Tensor:
    images = [future.result() for future in futures]
    return torch.stack(images) if images else torch.zeros(0, size, size, 3, dtype=torch.uint8)
