"""Every optimizer of torch whose state can follow, and a network of all kinds of layers to train with it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import pufferfish as pf

Make = Callable[[Iterable[Any]], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, 0.05, momentum=0.9),
    "SGD nesterov": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD plain": lambda p: optim.SGD(p, 0.05),
    "Adam": lambda p: optim.Adam(p, 1e-3),
    "AdamW amsgrad": lambda p: optim.AdamW(p, 1e-3, amsgrad=True),
    "NAdam": lambda p: optim.NAdam(p, 1e-3),
    "RAdam": lambda p: optim.RAdam(p, 1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-3),
    "RMSprop momentum": lambda p: optim.RMSprop(p, 1e-3, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2, initial_accumulator_value=0.1),
    "SGD foreach": lambda p: optim.SGD(p, 0.05, momentum=0.9, foreach=True),
    "Adam foreach": lambda p: optim.Adam(p, 1e-3, foreach=True),
    "RMSprop foreach": lambda p: optim.RMSprop(p, 1e-3, foreach=True, momentum=0.5),
    "SGD fused": lambda p: optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "Adam fused": lambda p: optim.Adam(p, 1e-3, fused=True),
    "AdamW fused": lambda p: optim.AdamW(p, 1e-3, fused=True, amsgrad=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, 1e-2, fused=True),
}


class Net(nn.Module):
    """A layer of one matrix, of grouped blocks, of gates, and of matrices that share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.gru = nn.GRU(24, 16, batch_first=True)
        self.conv = nn.Conv1d(16, 24, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc(x))
        x = x + self.attention(x, x, x)[0]
        x = self.norm(self.conv(self.gru(x)[0].mT)).mT
        return self.head(x.mean(1))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, 16, generator=g)
    return x, (x.sum((1, 2)) > 0).long()


def train(model: nn.Module, optimizers: list[optim.Optimizer], steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, y = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def plan(model: nn.Module) -> pf.Plan:
    return pf.plan(model, 4, keep=["head"])


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}]


def muon_and_adamw(model: nn.Module, kind: type[optim.Muon] = optim.Muon) -> list[optim.Optimizer]:
    """Muon for all matrices, AdamW for the rest; by name, in two groups each."""
    named = list(model.named_parameters())
    matrices, filters = ([x for x in named if x[1].dim() == 2], [x for x in named if x[1].dim() > 2])
    vectors = [x for x in named if x[1].dim() < 2]
    first = [{"params": matrices[:2]}, {"params": matrices[2:], "lr": 0.003, "weight_decay": 0.01}]
    rest = [{"params": vectors, "weight_decay": 0.0}, {"params": filters}]
    return [kind(first, lr=0.01), optim.AdamW([group for group in rest if group["params"]], lr=1e-3)]
