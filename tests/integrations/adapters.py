"""Model, data and comparison of the adapters' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from pufferfish.distributed.exact import exact_

SAMPLES, BATCH, EPOCHS = 32, 8, 3  # four updates an epoch


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def samples() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(64, generator=generator), i % 4) for i in range(SAMPLES)]


def same(one: nn.Module, other: nn.Module) -> None:
    pairs = list(zip(one.named_parameters(), other.named_parameters(), strict=True))
    assert pairs
    for (name, p), (twin, q) in pairs:
        assert name == twin
        assert torch.equal(p, q), name


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of the scalars in a folder of event files, by name."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Register:
    """Registers the exact hook, and records the models it is called with."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, ddp: Any) -> None:
        self.seen.append(ddp)
        exact_(ddp)
