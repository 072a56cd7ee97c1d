"""`ImageClassification`: base class of tasks that classify images."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import BatchOrder, Device, cut_out_, normalize, shift_and_flip, steps_per_epoch, uniform
from .recipe import Recipe
from .task import Batch, Task, eval_mode


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
