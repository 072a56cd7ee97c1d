"""`PruningMasks`: masks that prune the smallest weights of a model and hold them at zero."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn, optim

from ...layers.names import own_name, unwrap


class PruningMasks:
    """One mask for every parameter of two or more dimensions; the masks stay the same tensors.

    >>> model = nn.Linear(4, 2)
    >>> masks = PruningMasks(model)
    >>> masks.prune(0.25)
    >>> masks.apply()
    >>> masks.remaining, masks.total, int(model.weight.count_nonzero())
    (6, 8, 6)
    """

    def __init__(self, model: nn.Module) -> None:
        named = unwrap(model).named_parameters()
        self.weights = {own_name(n): p for n, p in named if p.dim() > 1 and p.requires_grad}
        if not self.weights:
            raise ValueError("LotteryTicket: the model has no weights of two or more dimensions to prune")
        self.masks = {name: torch.ones_like(p, requires_grad=False) for name, p in self.weights.items()}
        self.total = sum(p.numel() for p in self.weights.values())

    @property
    def remaining(self) -> int:
        """Number of weights that are not pruned."""
        return sum(int(mask.count_nonzero()) for mask in self.masks.values())

    def register_hooks(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Zero gradients of pruned weights in backward, and the weights after every step."""
        for name, p in self.weights.items():
            p.register_hook(lambda grad, name=name: grad * self.masks[name])
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: self.apply())

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
    def prune(self, fraction: float) -> None:
        """Prune a fraction of the remaining weights, the smallest of all."""
        mask = torch.cat([mask.flatten() for mask in self.masks.values()])
        magnitude = torch.cat([p.detach().abs().flatten() for p in self.weights.values()]).float()
        magnitude[mask == 0] = torch.inf
        mask[magnitude.topk(round(fraction * self.remaining), largest=False).indices] = 0
        parts = mask.split([m.numel() for m in self.masks.values()])
        for own, part in zip(self.masks.values(), parts, strict=True):
            own.copy_(part.view_as(own))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load the masks of another run of the same model."""
        if {n: m.shape for n, m in saved.items()} != {n: m.shape for n, m in self.masks.items()}:
            raise ValueError("LotteryTicket: the saved masks are for a model with other weights")
        for name, mask in self.masks.items():
            mask.copy_(saved[name])
        self.apply()
