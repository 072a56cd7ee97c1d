"""What tasks that tell images apart have in common."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.images import moved, scaled
from ..data.order import drawn, even, in_order, share, shuffled, steps
from .task import Batch, Recipe, Task, evaluating


class Classify(Task):
    """Images into classes, by cross-entropy. The data is `Splits` of bytes (n, h, w, c) and labels."""

    measure = "accuracy"
    #: Of the bytes, for each channel.
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    #: Training images move by up to so many pixels, and are mirrored or not.
    shift: ClassVar[int] = 0
    mirror: ClassVar[bool] = False

    def steps(self, data: Any, batch: int) -> int:
        return steps(data.size("train"), batch, "training images")

    def batches(
        self,
        data: Any,
        split: str,
        batch: int,
        *,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        rank: int = 0,
        size: int = 1,
        start: int = 0,
    ) -> Iterator[Batch]:
        pixels, labels = data.on(split, device)
        n = len(labels)
        if split != "train":
            for rows in islice(in_order(n, batch, device), start, None):
                mine = rows[share(len(rows), rank, size)]
                yield scaled(pixels[mine], self.mean, self.std), labels[mine]
            return
        even(batch, size)
        order = shuffled(n, batch, generator, "training images", device)
        # All random numbers of the epoch before its first batch, so that a resumed one has the same.
        shifts = (drawn((2, n), generator) * (2 * self.shift + 1)).long().to(device) - self.shift
        mirrored = (drawn(n, generator) < (0.5 if self.mirror else 0.0)).to(device)
        for rows in islice(order, start, None):
            mine = rows[share(batch, rank, size)]
            images = moved(pixels, mine, shifts[0, mine], shifts[1, mine], mirrored[mine])
            yield scaled(images, self.mean, self.std), labels[mine]

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=recipe.label_smoothing)

    def evaluate(
        self,
        model: nn.Module,
        data: Any,
        split: str,
        *,
        device: torch.device | str = "cpu",
        batch: int = 1000,
    ) -> dict[str, float]:
        right, lost, seen = torch.zeros((), device=device), torch.zeros((), device=device), 0
        with evaluating(model) as plain:
            for images, labels in self.batches(data, split, batch, device=device):
                logits = plain(images).float()
                right += (logits.argmax(1) == labels).sum()
                lost += F.cross_entropy(logits, labels, reduction="sum")
                seen += len(labels)
        if not seen:
            raise ValueError(f"{self.name}: there is nothing in {split}")
        return {"accuracy": 100 * float(right) / seen, "loss": float(lost) / seen}
