"""`PruningMasks`: masks that prune the smallest weights of a model and hold them at zero."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...layers.names import own_name, unwrap


class PruningMasks:
    """One mask for every parameter of two or more dimensions; the masks stay the same tensors.

    Args:
        keep: names or patterns of parameters that are never pruned.

    >>> model = nn.Linear(4, 2)
    >>> masks = PruningMasks(model)
    >>> masks.prune(0.25, "global")
    >>> masks.apply()
    >>> masks.remaining, masks.total, int(model.weight.count_nonzero())
    (6, 8, 6)
    """

    def __init__(self, model: nn.Module, keep: Iterable[str] = ()) -> None:
        self.weights = _prunable_weights(unwrap(model), tuple(keep))
        self.masks = {name: torch.ones_like(p, requires_grad=False) for name, p in self.weights.items()}
        self.total = sum(p.numel() for p in self.weights.values())

    @property
    def remaining(self) -> int:
        """Number of weights that are not pruned."""
        return sum(int(mask.count_nonzero()) for mask in self.masks.values())

    def register_hooks(self, optimizers: Sequence[optim.Optimizer]) -> list[Any]:
        """Zero gradients of pruned weights in backward, and the weights after every step; returns the hooks' handles."""
        handles: list[Any] = [
            p.register_hook(lambda grad, name=name: grad * self.masks[name])
            for name, p in self.weights.items()
        ]
        return handles + [o.register_step_post_hook(lambda *_: self.apply()) for o in optimizers]

    @torch.no_grad()
    def apply(self) -> None:
        """Zero the pruned weights."""
        torch._foreach_mul_(list(self.weights.values()), list(self.masks.values()))

    @torch.no_grad()
    def apply_to_state(self, optimizer: optim.Optimizer) -> None:
        """Zero the optimizer's state of the pruned weights."""
        for name, p in self.weights.items():
            for value in optimizer.state.get(p, {}).values():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    value.mul_(self.masks[name])

    def check_finite(self) -> None:
        """Raise ValueError if a weight is inf or NaN."""
        for name, p in self.weights.items():
            if not torch.isfinite(p.detach()).all():
                raise ValueError(f"{name}: it contains inf or NaN; nothing was pruned")

    @torch.no_grad()
    def prune(self, fraction: float, scope: str) -> None:
        """Prune a fraction of the remaining weights: the smallest of all ("global") or of each tensor ("layer")."""
        scopes = [[name] for name in self.weights] if scope == "layer" else [list(self.weights)]
        for names in scopes:
            masks = [self.masks[name].flatten() for name in names]
            magnitudes = [self.weights[name].detach().abs().flatten() for name in names]
            mask, magnitude = torch.cat(masks), torch.cat(magnitudes).float()
            remaining = int(mask.count_nonzero())
            magnitude[mask == 0] = torch.inf
            mask[magnitude.topk(round(fraction * remaining), largest=False).indices] = 0
            for name, part in zip(names, mask.split([len(m) for m in masks]), strict=True):
                self.masks[name].copy_(part.view_as(self.masks[name]))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load the masks of another run of the same model."""
        if {n: m.shape for n, m in saved.items()} != {n: m.shape for n, m in self.masks.items()}:
            raise ValueError(
                "LotteryTicket: the saved masks are for a model with other weights, or for another keep="
            )
        for name, mask in self.masks.items():
            mask.copy_(saved[name])
        self.apply()


def _prunable_weights(model: nn.Module, keep: tuple[str, ...]) -> dict[str, nn.Parameter]:
    weights = {own_name(n): p for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad}
    matches = {pattern: fnmatch.filter(weights, pattern) for pattern in keep}
    for pattern, names in matches.items():
        if not names:
            raise ValueError(f"LotteryTicket: keep={pattern!r} matches none of " + ", ".join(weights))
    weights = {n: p for n, p in weights.items() if not any(n in names for names in matches.values())}
    if not weights:
        raise ValueError("LotteryTicket: the model has no weights of two or more dimensions to prune")
    return weights
