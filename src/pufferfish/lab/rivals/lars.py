"""LARS: SGD with a learning rate per layer, proportional to the norm of its weights over that of its gradient."""

from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT

from .trust_ratio import LayerwiseOptimizer, trust_ratios


class LARS(LayerwiseOptimizer, optim.SGD):  # type: ignore[misc]  # step takes no closure
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017).

    g ← η‖w‖/(‖g‖ + λ‖w‖) · (g + λw), then momentum and the step of SGD. As in torch's SGD, the learning rate is not part
    of the momentum, so that a schedule acts at once.

    Args:
        lr: usually 5 to 30 for large batches, since `trust` is small.
        trust: η.

    A layer whose weights or gradient are all 0 has ratio 1.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = LARS(layer.parameters(), lr=10.0, weight_decay=1e-4, nesterov=True)
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> before = layer.weight.detach().clone()
    >>> optimizer.step()
    >>> moved = (layer.weight - before).norm() / before.norm()
    >>> f"{moved:.3f}"  # 10 · 0.001, and 0.9 times that for Nesterov momentum
    '0.019'
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(params, lr, momentum, 0.0, weight_decay, nesterov)
        self.defaults["trust"] = trust

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], scaled: bool) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        if scaled:
            ratios = trust_ratios(params, grads, self.defaults["trust"], decay)
            grads = list(torch._foreach_add(grads, params, alpha=decay))
            torch._foreach_mul_(grads, ratios)
        if momentum:
            buffers = [self._buffer(p) for p in params]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, grads)
            nesterov = group["nesterov"]
            grads = list(torch._foreach_add(grads, buffers, alpha=momentum)) if nesterov else buffers
        torch._foreach_sub_(params, torch._foreach_mul(grads, group["lr"]))

    def _buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum_buffer"]
        return buffer
