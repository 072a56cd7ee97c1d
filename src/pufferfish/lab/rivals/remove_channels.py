"""`remove_`: channels taken out for good, in a model and in its optimizer's state, so that it is really smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from ...layers.names import unwrap
from ...optim.carry import Optimizers, as_list, check, swap
from .channels import Group


@torch.no_grad()
def remove_(model: nn.Module, kept: Sequence[tuple[Group, Tensor]], optimizer: Optimizers = None) -> None:
    """Keep only these channels of each group, in every tensor of the model and of the optimizer's state.

    Modules and optimizers stay the same objects, their parameters are new ones. A DDP wrapper must be made anew.

    Args:
        kept: groups of this model, and the indices of the channels that stay.

    >>> from pufferfish.lab.rivals.channels import groups
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> remove_(net, [(groups(net)[1], torch.tensor([0, 2, 5]))])
    >>> net[0].out_channels, net[1].num_features, net[3].weight.shape
    (3, 3, torch.Size([4, 3, 3, 3]))
    """
    inner, optimizers = unwrap(model), as_list(optimizer)
    check(optimizers)
    refuse_unlike(inner, kept, optimizers)
    for name, cut in _cuts(inner, kept).items():
        path, _, own = name.rpartition(".")
        layer = inner.get_submodule(path)
        old: Tensor = getattr(layer, own)
        new = _sliced(old.detach(), cut)
        if own not in layer._parameters:
            setattr(layer, own, new)
            continue
        new = nn.Parameter(new, old.requires_grad)
        setattr(layer, own, new)
        for one in optimizers:
            if swap(one, [old], [new]) and old in one.state:
                state = one.state.pop(old)
                one.state[new] = {key: _sliced(x, cut) if _like(x, old) else x for key, x in state.items()}
    for group, _ in kept:
        for name in group.writers + group.norms + group.readers:
            _renumber(inner.get_submodule(name))


def _cuts(model: nn.Module, kept: Sequence[tuple[Group, Tensor]]) -> dict[str, dict[int, Tensor]]:
    """By name of a parameter or buffer: which indices stay in which of its dimensions."""
    cuts: dict[str, dict[int, Tensor]] = {}
    for group, index in kept:
        for name, own, dim in _places(group):
            x = getattr(model.get_submodule(name), own, None)
            if not isinstance(x, Tensor) or x.dim() <= dim:
                continue
            each = x.shape[dim] // group.size  # a flattened channel is so many inputs
            wide = index[:, None] * each + torch.arange(each, device=index.device)
            cuts.setdefault(f"{name}.{own}", {})[dim] = wide.flatten().to(x.device)
    return cuts


def _places(group: Group) -> Iterator[tuple[str, str, int]]:
    """(layer, tensor, dimension) of all that counts the group's channels."""
    for name in group.writers:
        yield from ((name, own, 0) for own in ("weight", "bias"))
    for name in group.norms:
        yield from ((name, own, 0) for own in ("weight", "bias", "running_mean", "running_var"))
    for name in group.readers:
        yield name, "weight", 1


def _sliced(x: Tensor, cut: dict[int, Tensor]) -> Tensor:
    turned = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    for dim, index in cut.items():
        x = x.index_select(dim, index.to(x.device))
    return x.contiguous(memory_format=torch.channels_last if turned else torch.contiguous_format)


def _like(x: Any, parameter: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape == parameter.shape


def refuse_unlike(
    model: nn.Module, kept: Sequence[tuple[Group, Tensor]], optimizers: Sequence[optim.Optimizer]
) -> None:
    """Refuse optimizer state that has no channels to remove, before anything is changed."""
    cuts = _cuts(model, kept)
    for name, parameter in model.named_parameters():
        for one in optimizers if name in cuts else ():
            for key, x in one.state.get(parameter, {}).items():
                if isinstance(x, Tensor) and x.numel() > 1 and not _like(x, parameter):
                    raise ValueError(
                        f"{name}: {type(one).__name__} keeps {key!r} in another shape than the parameter's, so its "
                        "channels cannot be removed; take an optimizer such as SGD or AdamW"
                    )


def _renumber(layer: nn.Module) -> None:
    """The layer's own account of its size."""
    if isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, _BatchNorm):
        counted = layer.weight if layer.affine else layer.running_mean
        assert counted is not None
        layer.num_features = len(counted)
