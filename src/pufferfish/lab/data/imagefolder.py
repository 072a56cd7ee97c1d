"""Folders of image files, one for each class: listed, and decoded by threads while the device computes."""

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

KINDS = (".jpeg", ".jpg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Files:
    """Image files and the class of each."""

    paths: Sequence[Path]
    labels: Tensor

    def some(self, rows: Tensor) -> Files:
        """Those of `rows`."""
        return Files([self.paths[i] for i in rows.tolist()], self.labels[rows])


def listed(folder: Path, classes: Sequence[str] | None = None) -> tuple[Files, list[str]]:
    """The files below `folder` and its classes, in alphabetical order; `classes` are those there must be."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if classes is not None and names != list(classes):
        other = sorted(set(names) ^ set(classes))[:3]
        raise ValueError(f"{folder}: its classes are not those of the training images ({', '.join(other)}…)")
    paths, labels = [], []
    for label, name in enumerate(names):
        files = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in KINDS)
        if not files:
            raise ValueError(f"{folder / name}: there are no images ({', '.join(KINDS)})")
        paths += files
        labels += [label] * len(files)
    if not paths:
        raise ValueError(f"{folder}: it has no folder of images for each class")
    return Files(paths, torch.tensor(labels)), names


def decoded(path: Path, size: int, draws: Sequence[float] | None) -> Tensor:
    """Bytes (size, size, 3): the middle of the image, or with four `draws` from 0 to 1 a random part of it."""
    image_module = _pillow()
    try:
        with image_module.open(path) as image:
            box = middle(*image.size) if draws is None else part(*image.size, *draws)
            small = image.convert("RGB").resize((size, size), image_module.Resampling.BILINEAR, box=box)
            return torch.from_numpy(np.array(small))
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        raise ValueError(f"{path}: not a readable image ({error})") from None


def middle(width: int, height: int) -> Box:
    """The square in the middle, 7/8 of the shorter side: 224 of 256.

    >>> middle(512, 256)
    (144.0, 16.0, 368.0, 240.0)
    """
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def part(width: int, height: int, area: float, shape: float, across: float, down: float) -> Box:
    """A part of 8 to 100 % of the area, between 3:4 and 4:3, anywhere; from four draws.

    >>> part(100, 100, 1.0, 0.5, 0.0, 0.0)
    (0.0, 0.0, 100.0, 100.0)
    """
    pixels = width * height * (0.08 + 0.92 * area)
    ratio = math.exp((2 * shape - 1) * math.log(4 / 3))
    w, h = min(math.sqrt(pixels * ratio), width), min(math.sqrt(pixels / ratio), height)
    left, top = across * (width - w), down * (height - h)
    return left, top, min(left + w, float(width)), min(top + h, float(height))


def ahead(work: Iterable[Sequence[Any]], size: int, threads: int | None = None) -> Iterator[Tensor]:
    """For each list of `decoded`'s (path, draws) a batch of bytes; the next one is decoded meanwhile."""
    with ThreadPoolExecutor(threads or min(os.cpu_count() or 1, 16)) as pool:

        def begun(pieces: Sequence[Any]) -> list[Future[Tensor]]:
            return [pool.submit(decoded, path, size, draws) for path, draws in pieces]

        waiting: list[list[Future[Tensor]]] = []
        try:
            for pieces in work:
                waiting.append(begun(pieces))
                if len(waiting) > 1:
                    yield _stacked(waiting.pop(0), size)
            while waiting:
                yield _stacked(waiting.pop(0), size)
        finally:
            pool.shutdown(cancel_futures=True)  # nobody waits for the rest of an epoch that ends early


def _stacked(coming: list[Future[Tensor]], size: int) -> Tensor:
    images = [future.result() for future in coming]
    return torch.stack(images) if images else torch.zeros(0, size, size, 3, dtype=torch.uint8)


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise ImportError("imagefolder reads images by Pillow: pip install pillow") from None
