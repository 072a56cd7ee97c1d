"""Scales γ of batch norms, by which channels are pruned: the groups that have them, scores, and an L1 penalty."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...layers.names import unwrap
from .channel_groups import ChannelGroup, channel_groups


def prunable_groups(model: nn.Module) -> list[ChannelGroup]:
    """Return the groups of channels that batch norms scale and that are not inputs or outputs of the model.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> [group.norms for group in prunable_groups(net)]
    [['1']]
    """
    groups = [group for group in channel_groups(model) if group.norms and not group.fixed]
    groups = [group for group in groups if list(_scales(model, [group]))]
    if not groups:
        raise ValueError(
            f"{type(model).__name__}: no channels are scaled by a batch norm, whose scales are needed for pruning"
        )
    return groups


def channel_scores(model: nn.Module, groups: Sequence[ChannelGroup]) -> Tensor:
    """Return |γ| of every channel, group after group; the mean where several norms scale a channel."""
    scores = []
    for group in groups:
        scales = [s.detach().abs().float() for s in _scales(unwrap(model), [group])]
        scores.append(torch.stack(scales).mean(0))
        if not torch.isfinite(scores[-1]).all():
            raise ValueError(f"{group.norms[0]}: a scale of its channels is inf or NaN; nothing was removed")
    return torch.cat(scores)


class L1Penalty:
    """Adds the gradient of l1 · |γ| to the scales before every optimizer step, until `remove`."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ChannelGroup],
        optimizers: Sequence[optim.Optimizer],
        l1: float,
    ) -> None:
        self.model, self.groups, self.l1 = model, groups, l1
        self._handles = [o.register_step_pre_hook(self._add_gradient) for o in optimizers]

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    @torch.no_grad()
    def _add_gradient(self, optimizer: optim.Optimizer, *_: Any) -> None:
        scales = {id(scale) for scale in _scales(unwrap(self.model), self.groups)}
        for group in optimizer.param_groups:
            own = [p for p in group["params"] if id(p) in scales and p.grad is not None]
            if own:
                penalties = torch._foreach_sign(own)
                torch._foreach_mul_(penalties, self.l1)
                torch._foreach_add_([p.grad for p in own], penalties)


def _scales(model: nn.Module, groups: Sequence[ChannelGroup]) -> Iterator[Tensor]:
    for group in groups:
        for name in group.norms:
            scale = model.get_submodule(name).weight
            if isinstance(scale, Tensor):
                yield scale
