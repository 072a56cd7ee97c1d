"""Handwritten digits of 8×8 pixels: comes along, trains in seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from ..data.digits import digits
from ..data.order import Splits, held_out
from .classify import Classify
from .task import Recipe, known


@dataclass(frozen=True)
class Digits(Classify):
    """Needs no data folder.

    Args:
        model: "cnn", three convolutions and two linear layers, or "mlp", three linear layers.
        width: channels of the first convolution, a quarter of those of the last; 4 × it in the hidden layers.
        held: training images held out for validation.

    >>> task = Digits()
    >>> data = task.load(None)
    >>> images, labels = next(task.batches(data, "train", 32, generator=torch.Generator()))
    >>> task.build()(images).shape
    torch.Size([32, 10])
    """

    name = "digits"
    mean, std = (4.9,), (6.0,)
    shift = 1

    model: str = "cnn"
    width: int = 64
    held: int = 144

    def __post_init__(self) -> None:
        known(self.name, "model", self.model, ("cnn", "mlp"))

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        return {
            "short": Recipe(
                epochs=12,
                batch=64,
                lr=0.03 if self.model == "cnn" else 0.1,
                warm_up=0.2,
                nesterov=True,
                weight_decay=5e-4,
                label_smoothing=0.1,
                switch_at=4,
            )
        }

    @property
    def keep(self) -> Sequence[str]:
        return ("conv1", "fc2") if self.model == "cnn" else ("fc3",)

    def build(self) -> nn.Module:
        w = self.width
        sizes: tuple[int, ...] = (64, 4 * w, 4 * w, 10)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.model == "cnn":
            for i, (inputs, outputs) in enumerate(((1, w), (w, 2 * w), (2 * w, 4 * w)), start=1):
                layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
                layers[f"bn{i}"] = nn.BatchNorm2d(outputs)
                layers[f"relu{i}"] = nn.ReLU()
                if i > 1:
                    layers[f"pool{i}"] = nn.MaxPool2d(2)
            sizes = (16 * w, 4 * w, 10)
        layers["flat"] = nn.Flatten()
        for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            layers[f"fc{i}"] = nn.Linear(inputs, outputs)
            if outputs != 10:
                layers[f"act{i}"] = nn.ReLU()
        return nn.Sequential(layers)

    def load(self, folder: Path | None) -> Splits:
        (images, labels), test = digits(), digits(test=True)
        train, valid = held_out(len(labels), self.held)
        parts = {
            "train": (images[train], labels[train]),
            "valid": (images[valid], labels[valid]),
            "test": test,
        }
        return Splits(
            {s: ((x * 16).round().to(torch.uint8).permute(0, 2, 3, 1), y) for s, (x, y) in parts.items()}
        )
