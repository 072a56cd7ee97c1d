"""A small training job with all that a checkpoint may hold, its optimizers, and what it is compared by."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.checkpoint import Checkpoint
from pufferfish.checkpoint.folder import OWNER

SWITCH, TOTAL = 4, 7


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip


class Loader:
    """A position in the data: what `data=` saves."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.count = 0

    def next(self) -> tuple[Tensor, Tensor]:
        self.count += 1
        x = torch.randn(6, 2, 4, 4, generator=self.generator)
        return x, torch.randint(4, (6,), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.generator.set_state(state["generator"])


class Run:
    """All objects of a training job, fresh, and its loop."""

    def __init__(
        self, make: Callable[[nn.Module, Run], Any], folder: Path, seed: int, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model, self.loader = build(), Loader()
        self.scheduler: Any = None
        self.scaler: Any = None
        self.amp = False
        self.optimizers = make(self.model, self)
        self.switch = pf.Switch(rank=0.25, when=pf.AtStep(SWITCH))
        self.checkpoint = Checkpoint(
            folder, self.model, self.optimizers, switch=self.switch, scheduler=self.scheduler,
            scaler=self.scaler, data=self.loader, **options,
        )  # fmt: skip

    def go(self, start: int, stop: int, after_switch: bool = False) -> Run:
        """With `after_switch` it saves right behind the switch, before the step's update."""
        for step in range(start, stop):
            if self.switch.step(self.model, self.optimizers, step=step) and after_switch:
                self.checkpoint.save(step=step)
                break
            self.update()
            self.checkpoint.step(step=step + 1)
        self.checkpoint.close()
        return self

    def update(self) -> None:
        x, y = self.loader.next()
        x = x + 0.01 * random.random() + 0.01 * np.random.rand()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            loss = nn.functional.cross_entropy(self.model(x), y)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        for optimizer in self.optimizers if isinstance(self.optimizers, list) else [self.optimizers]:
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
            optimizer.zero_grad()
        if self.scaler:
            self.scaler.update()
        for scheduler in self.scheduler if isinstance(self.scheduler, list) else [self.scheduler]:
            if scheduler is not None:
                scheduler.step()

    def everything(self) -> list[Any]:
        optimizers = self.optimizers if isinstance(self.optimizers, list) else [self.optimizers]
        schedulers = self.scheduler if isinstance(self.scheduler, list) else [self.scheduler]
        return [
            dict(self.model.state_dict()),
            [optimizer.state_dict() for optimizer in optimizers],
            [scheduler and scheduler.state_dict() for scheduler in schedulers],
            self.scaler and self.scaler.state_dict(),
            self.switch.state_dict(),
            self.loader.state_dict(),
            [torch.rand(3), random.random(), np.random.rand()],
        ]


def momentum(model: nn.Module, run: Run) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    run.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=TOTAL + 1)
    return optimizer


def adamw(model: nn.Module, run: Run) -> Any:
    decayed = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    rest = [(n, p) for n, p in model.named_parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], amsgrad=True)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return optimizer


def fused(model: nn.Module, run: Run) -> Any:
    return torch.optim.AdamW(model.parameters(), fused=True)


def two_optimizers(model: nn.Module, run: Run) -> Any:
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.RMSprop([*model[7].parameters(), *model[5].parameters(), *model[1].parameters()])
    run.scheduler = [torch.optim.lr_scheduler.MultiStepLR(x, [2, 5]) for x in (first, second)]
    return [first, second]


def muon(model: nn.Module, run: Run) -> Any:
    matrices = [model[5].weight, model[7].weight]
    rest = [p for p in model.parameters() if not any(p is x for x in matrices)]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest)]


def mixed_precision(model: nn.Module, run: Run) -> Any:
    run.amp, run.scaler = True, torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return torch.optim.NAdam(model.parameters())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != OWNER)
