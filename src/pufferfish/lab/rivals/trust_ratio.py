"""The trust ratio of LARS and LAMB, and the base class of both."""

from typing import Any

import torch
from torch import Tensor


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers that scale the update of each matrix or filter; vectors have no weight decay and ratio 1."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            for scaled in (True, False):
                params = [p for p in group["params"] if p.grad is not None and (p.dim() > 1) == scaled]
                if params:
                    self._update(group, params, [p.grad for p in params], scaled)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], scaled: bool) -> None:
        """Update some parameters of a group; if `scaled`, with weight decay and the trust ratio."""
        raise NotImplementedError


def trust_ratios(
    weights: list[Tensor], updates: list[Tensor], trust: float = 1.0, decay: float = 0.0
) -> list[Tensor]:
    """Return η‖w‖ / (‖u‖ + λ‖w‖) for every pair, on its device; 1 where one of the norms is 0.

    >>> w, u = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    >>> trust_ratios([w, w], [u, torch.zeros(2)])
    [tensor(2.5000), tensor(1.)]
    """
    w, u = (torch.stack(torch._foreach_norm(x)) for x in (weights, updates))
    ratios = trust * w / (u + decay * w)
    return list(torch.where((w > 0) & (u > 0), ratios, 1.0).unbind())
