"""The trust ratio of LARS and LAMB, and the base class of both."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers that scale the update of each layer; parameters are updated in batches."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; `closure` computes loss and gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params, grads, scaled in parameter_batches(group):
                self._update(group, params, grads, scaled)
        return loss

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
    w, u = (
        torch.stack(torch._foreach_norm(x, 2, accumulation_dtype(weights[0]))) for x in (weights, updates)
    )
    ratios = trust * w / (u + decay * w)
    return list(torch.where((w > 0) & (u > 0), ratios, 1.0).unbind())


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the tensor's dtype, or fp32 if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def parameter_batches(group: dict[str, Any]) -> Iterator[tuple[list[Tensor], list[Tensor], bool]]:
    """Yield parameters and gradients that one kernel can update, and whether they get decay and the trust ratio.

    With foreach=False each parameter is a batch of its own, which needs less memory.
    """
    batches: dict[Any, list[Tensor]] = {}
    for p in group["params"]:
        if p.grad is not None:
            scaled = p.dim() > 1 or not group["exclude_vectors"]
            single = id(p) if group["foreach"] is False else None
            batches.setdefault((scaled, p.device, p.dtype, single), []).append(p)
    for (scaled, *_), params in batches.items():
        yield params, [p.grad for p in params if p.grad is not None], scaled


def add_group_settings(optimizer: torch.optim.Optimizer, **settings: Any) -> None:
    """Add settings to all parameter groups, also future ones; a group's own values stay."""
    optimizer.defaults |= settings
    for group in optimizer.param_groups:
        for key, value in settings.items():
            group.setdefault(key, value)
