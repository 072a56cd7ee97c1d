"""A network with one of each family of layers, and what must be the same after a failure."""

from typing import Any

import torch
from torch import Tensor, nn, optim

from pufferfish.layers import LowRank


class Mixed(nn.Module):
    """One of each family of layers, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, add_bias_kv=True)
        self.fc = nn.Linear(64, 48)

    def forward(self, images: Tensor) -> Tensor:
        x = self.up(self.grouped(self.norm(self.conv(images)).relu()))
        x = x.mean(2).mT
        x = self.gru(self.lstm(x)[0])[0]
        return self.fc(self.attention(x, x, x)[0])


def images() -> Tensor:
    return torch.randn(2, 3, 12, 12)


def low_rank_modules(model: nn.Module) -> list[LowRank]:
    return [m for m in model.modules() if isinstance(m, LowRank)]


def snapshot(model: nn.Module, optimizer: optim.Optimizer | None) -> list[Any]:
    """Everything that must be the same after a failure: objects by identity, tensors by value."""
    found: list[Any] = [
        [(name, id(m), m.training) for name, m in model.named_modules()],
        [(name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)],
        [(name, v.tolist()) for name, v in model.state_dict(keep_vars=True).items()],
        [(k, id(v), list(v)) for m in model.modules() for k, v in vars(m).items() if k.endswith("_hooks")],
    ]
    if optimizer is not None:
        found += [
            [[id(p) for p in group["params"]] for group in optimizer.param_groups],
            [(id(p), {k: _plain(v) for k, v in s.items()}) for p, s in optimizer.state.items()],
        ]
    return found


def _plain(value: Any) -> Any:
    return (id(value), value.tolist()) if isinstance(value, Tensor) else value
