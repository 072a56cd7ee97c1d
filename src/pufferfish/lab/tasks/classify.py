"""What tasks that tell images apart have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.images import moved, scaled
from ..data.order import Epoch, drawn, steps
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

    def epoch(self, data: Any, of: Epoch) -> Iterator[Batch]:
        pixels, labels = data.on(of.split, of.device)
        n = len(labels)
        order = of.order(n, "training images")
        if not of.training:
            for rows in order:
                mine = of.share(rows)
                yield scaled(pixels[mine], self.mean, self.std), labels[mine]
            return
        # All random numbers of the epoch before its first batch, so that a resumed one has the same.
        shifts = (drawn((2, n), of.generator) * (2 * self.shift + 1)).long().to(of.device) - self.shift
        mirrored = (drawn(n, of.generator) < (0.5 if self.mirror else 0.0)).to(of.device)
        for rows in order:
            mine = of.share(rows)
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
