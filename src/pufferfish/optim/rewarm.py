"""The learning rate after the switch: kept, scaled, or warmed up again, under any schedule."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Rewarm:
    """The schedule's rate times a ramp to 1 over the first `steps` updates after the switch.

    >>> ramp = Rewarm(4)
    >>> [ramp.factor(done) for done in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"Rewarm: steps={self.steps!r} is not a whole number ≥ 1")

    def factor(self, done: int) -> float:
        """What the rate is multiplied with once so many updates are done."""
        return min(1.0, (done + 1) / self.steps)


class ScaledRate:
    """Multiplies the rate of an optimizer during its updates only.

    What schedulers read and write between updates stays theirs, whether they compute from the last rate or
    from the first.
    """

    def __init__(self, optimizer: Optimizer, lr: float | Rewarm, done: int = 0) -> None:
        self.lr = lr
        self.done = done  # updates since the switch
        self._own: list[Any] = []
        # The rate is scaled before any other hook sees it.
        before = optimizer.register_step_pre_hook(self._scale)
        hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
        hooks.move_to_end(before.id, last=False)
        self._handles = [before, optimizer.register_step_post_hook(self._restore)]

    def remove(self) -> None:
        """From now on the schedule's rate as it is."""
        for handle in self._handles:
            handle.remove()

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        factor = self.lr.factor(self.done) if isinstance(self.lr, Rewarm) else self.lr
        self._own = [
            g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in optimizer.param_groups
        ]
        for group, own in zip(optimizer.param_groups, self._own, strict=True):
            _set(group, own * factor)

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        for group, own in zip(optimizer.param_groups, self._own, strict=True):
            _set(group, own)
        self.done += 1


@torch.no_grad()
def _set(group: dict[str, Any], lr: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(lr)  # captured graphs hold on to the tensor
    else:
        group["lr"] = lr
