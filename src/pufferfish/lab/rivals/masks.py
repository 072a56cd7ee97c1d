"""`Masks`: which weights of a model are left, the smallest pruned, and the pruned ones held at zero."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...layers.names import own_name, unwrap


class Masks:
    """One for every parameter of two dimensions or more; they stay the same tensors.

    Args:
        keep: names or patterns of parameters that are never pruned.

    >>> model = nn.Linear(4, 2)
    >>> masks = Masks(model)
    >>> masks.prune(0.25, "global")
    >>> masks.apply()
    >>> masks.left, masks.total, int(model.weight.count_nonzero())
    (6, 8, 6)
    """

    def __init__(self, model: nn.Module, keep: Iterable[str] = ()) -> None:
        self.weights = _prunable(unwrap(model), tuple(keep))
        self.of = {name: torch.ones_like(p, requires_grad=False) for name, p in self.weights.items()}
        self.total = sum(p.numel() for p in self.weights.values())

    @property
    def left(self) -> int:
        """How many weights are not pruned."""
        return sum(int(mask.count_nonzero()) for mask in self.of.values())

    def hold(self, optimizers: Sequence[optim.Optimizer]) -> list[Any]:
        """From now on gradients of pruned weights are zeroed in backward, the weights after every step; handles to stop."""
        handles: list[Any] = [
            p.register_hook(lambda grad, name=name: grad * self.of[name]) for name, p in self.weights.items()
        ]
        return handles + [o.register_step_post_hook(lambda *_: self.apply()) for o in optimizers]

    @torch.no_grad()
    def apply(self) -> None:
        """Zero in the weights."""
        torch._foreach_mul_(list(self.weights.values()), list(self.of.values()))

    @torch.no_grad()
    def apply_to_state(self, optimizer: optim.Optimizer) -> None:
        """Zero in what the optimizer keeps of the weights."""
        for name, p in self.weights.items():
            for value in optimizer.state.get(p, {}).values():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    value.mul_(self.of[name])

    def refuse(self) -> None:
        """Weights that have no size."""
        for name, p in self.weights.items():
            if not torch.isfinite(p.detach()).all():
                raise ValueError(f"{name}: it contains inf or NaN; nothing was pruned")

    @torch.no_grad()
    def prune(self, fraction: float, scope: str) -> None:
        """That share of the weights that are left: the smallest of all ("global") or of each tensor ("layer")."""
        parts = [[name] for name in self.weights] if scope == "layer" else [list(self.weights)]
        for names in parts:
            masks = [self.of[name].flatten() for name in names]
            sizes = [self.weights[name].detach().abs().flatten() for name in names]
            mask, size = torch.cat(masks), torch.cat(sizes).float()
            left = int(mask.count_nonzero())
            size[mask == 0] = torch.inf
            mask[size.topk(round(fraction * left), largest=False).indices] = 0
            for name, part in zip(names, mask.split([len(m) for m in masks]), strict=True):
                self.of[name].copy_(part.view_as(self.of[name]))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Those of another run of the same model."""
        if {n: m.shape for n, m in saved.items()} != {n: m.shape for n, m in self.of.items()}:
            raise ValueError(
                "LotteryTicket: the saved masks are for a model of other weights, or with other keep="
            )
        for name, mask in self.of.items():
            mask.copy_(saved[name])
        self.apply()


def _prunable(model: nn.Module, keep: tuple[str, ...]) -> dict[str, nn.Parameter]:
    found = {own_name(n): p for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad}
    kept = {pattern: fnmatch.filter(found, pattern) for pattern in keep}
    for pattern, names in kept.items():
        if not names:
            raise ValueError(f"LotteryTicket: keep={pattern!r} is none of " + ", ".join(found))
    found = {n: p for n, p in found.items() if not any(n in names for names in kept.values())}
    if not found:
        raise ValueError("LotteryTicket: the model has no weights of two dimensions or more to prune")
    return found
