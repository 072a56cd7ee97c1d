"""LAMB: AdamW with the update of each layer scaled to the norm of its weights."""

from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT

from .trust_ratio import LayerwiseOptimizer, trust_ratios


class LAMB(LayerwiseOptimizer, optim.AdamW):  # type: ignore[misc]  # step takes no closure
    """Layer-wise adaptive moments (You et al. 2020): r = m̂/(√v̂ + ε) + λw, then w ← w − lr · ‖w‖/‖r‖ · r.

    Args:
        lr: change of the weights in a step, relative to their norm.

    A layer whose weights or update are all 0 has ratio 1.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = LAMB(layer.parameters(), lr=0.01)
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> before = layer.weight.detach().clone()
    >>> optimizer.step()
    >>> f"{(layer.weight - before).norm() / before.norm():.3f}"
    '0.010'
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], scaled: bool) -> None:
        states = [self._state(p) for p in params]
        means, squares, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)

        done = torch.stack(steps).double()  # 1 − 0.999 has only four digits in fp32
        first, second = ((1 - beta**done).tolist() for beta in group["betas"])
        denominators = torch._foreach_div(squares, second)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(means, first))
        torch._foreach_div_(updates, denominators)
        if scaled:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            torch._foreach_mul_(updates, trust_ratios(params, updates))
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(params, updates)

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        return state
