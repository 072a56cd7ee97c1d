"""The scales γ of batch norms, by which channels are chosen: which there are, their sizes, and L1 on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...layers.names import unwrap
from .channels import Group, groups


def removable(model: nn.Module) -> list[Group]:
    """The groups of channels that batch norms scale and nobody outside looks at.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> [group.norms for group in removable(net)]
    [['1']]
    """
    found = [group for group in groups(model) if group.norms and not group.fixed]
    found = [group for group in found if list(_scales(model, [group]))]
    if not found:
        raise ValueError(
            f"{type(model).__name__}: no channels are scaled by a batch norm, and their scales choose what is removed"
        )
    return found


def sizes(model: nn.Module, of: Sequence[Group]) -> Tensor:
    """|γ| of every channel, group after group; the mean where several norms scale it."""
    found = []
    for group in of:
        scales = [s.detach().abs().float() for s in _scales(unwrap(model), [group])]
        found.append(torch.stack(scales).mean(0))
        if not torch.isfinite(found[-1]).all():
            raise ValueError(f"{group.norms[0]}: a scale of its channels is inf or NaN; nothing was removed")
    return torch.cat(found)


class Pull:
    """Until `remove`, every step of the optimizers pulls the scales to zero (L1, on the gradients)."""

    def __init__(
        self, model: nn.Module, of: Sequence[Group], optimizers: Sequence[optim.Optimizer], l1: float
    ) -> None:
        self.model, self.of, self.l1 = model, of, l1
        self._handles = [o.register_step_pre_hook(self._pull) for o in optimizers]

    def remove(self) -> None:
        """Stop pulling."""
        while self._handles:
            self._handles.pop().remove()

    @torch.no_grad()
    def _pull(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            raise TypeError(
                "EarlyBird: optimizer.step takes no closure here; the scales are pulled before it"
            )
        scales = {id(scale) for scale in _scales(unwrap(self.model), self.of)}
        loss_scale = getattr(optimizer, "grad_scale", None)  # fused optimizers divide by it later
        for group in optimizer.param_groups:
            own = [p for p in group["params"] if id(p) in scales and p.grad is not None]
            if own:
                pulls = torch._foreach_sign(own)
                torch._foreach_mul_(pulls, -self.l1 if group.get("maximize") else self.l1)
                if loss_scale is not None:
                    torch._foreach_mul_(pulls, loss_scale.to(own[0].device, non_blocking=True))
                torch._foreach_add_([p.grad for p in own], pulls)


def _scales(model: nn.Module, of: Sequence[Group]) -> Iterator[Tensor]:
    for group in of:
        for name in group.norms:
            scale = model.get_submodule(name).weight
            if isinstance(scale, Tensor):
                yield scale
