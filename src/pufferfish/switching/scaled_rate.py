"""`ScaledRate`: scale the learning rate after the switch, under any schedule."""

from collections import OrderedDict
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer


class ScaledRate:
    """Multiplies the learning rate of an optimizer by `factor` during `step` only.

    Between steps schedulers read and write the unscaled rate, so that any kind of schedule works.
    """

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self.factor = factor
        # Unscaled and scaled rates of the groups, during a step.
        self._rates: list[tuple[Any, Any]] = []
        # First of all hooks, so that the others see the scaled rate.
        before = optimizer.register_step_pre_hook(self._scale)
        hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
        hooks.move_to_end(before.id, last=False)
        self._handles = [before, optimizer.register_step_post_hook(self._restore)]

    def remove(self) -> None:
        """Remove the hooks. The schedule's rate is used unscaled again."""
        for handle in self._handles:
            handle.remove()

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        # Left over if the step before has raised. A scheduler may have set another rate since then.
        for group, (rate, scaled) in zip(optimizer.param_groups, self._rates, strict=False):
            if group["lr"] == scaled:
                _set_rate(group, rate)
        kept = (group["lr"] for group in optimizer.param_groups)
        rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in kept]
        self._rates = [(rate, rate * self.factor) for rate in rates]
        for group, (_, scaled) in zip(optimizer.param_groups, self._rates, strict=True):
            _set_rate(group, scaled)

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        for group, (rate, _) in zip(optimizer.param_groups, self._rates, strict=True):
            _set_rate(group, rate)
        self._rates = []


@torch.no_grad()
def _set_rate(group: dict[str, Any], lr: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(lr)  # captured CUDA graphs refer to this tensor
    else:
        group["lr"] = lr
