"""The trust ratio of LARS and LAMB, and which parameters have one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class LayerWise(torch.optim.Optimizer):
    """An optimizer that updates layers together, and asks for each whether it is trusted."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; `closure` computes loss and gradients before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params, grads, trusted in alike(group):
                self._update(group, params, grads, trusted)
        return loss

    def _update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], trusted: bool
    ) -> None:
        """Of parameters that are alike; `trusted` ones are decayed and scaled by their trust ratio."""
        raise NotImplementedError


def trust_ratios(
    weights: list[Tensor], updates: list[Tensor], trust: float = 1.0, decay: float = 0.0
) -> list[Tensor]:
    """η‖w‖ / (‖u‖ + λ‖w‖) for every pair, on their device; 1 where one of the norms is 0.

    >>> w, u = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    >>> trust_ratios([w, w], [u, torch.zeros(2)])
    [tensor(2.5000), tensor(1.)]
    """
    w, u = (torch.stack(torch._foreach_norm(x, 2, wide(weights[0]))) for x in (weights, updates))
    ratios = trust * w / (u + decay * w)
    return list(torch.where((w > 0) & (u > 0), ratios, 1.0).unbind())


def wide(x: Tensor) -> torch.dtype:
    """In which numbers about a tensor are kept: fp32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def alike(group: dict[str, Any]) -> Iterator[tuple[list[Tensor], list[Tensor], bool]]:
    """Parameters and gradients that one kernel can update together, and whether they are decayed and trusted.

    With foreach=False each comes alone, which needs less memory.
    """
    found: dict[Any, list[Tensor]] = {}
    for p in group["params"]:
        if p.grad is not None:
            trusted = p.dim() > 1 or not group["exclude_vectors"]
            alone = id(p) if group["foreach"] is False else None
            found.setdefault((trusted, p.device, p.dtype, alone), []).append(p)
    for (trusted, *_), params in found.items():
        yield params, [p.grad for p in params if p.grad is not None], trusted


def complete(optimizer: torch.optim.Optimizer, **settings: Any) -> None:
    """More settings for all groups, also for those that will be added; what a group says itself stays."""
    optimizer.defaults |= settings
    for group in optimizer.param_groups:
        for key, value in settings.items():
            group.setdefault(key, value)
