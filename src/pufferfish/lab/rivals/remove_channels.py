"""`remove_channels_`: remove channels from a model and its optimizer's state, so that it is really smaller."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from ...layers.names import unwrap
from ...lowrank.carry import replace_parameters
from ...lowrank.optimizers import Optimizers, as_list, check_optimizers
from .channel_groups import ChannelGroup


@torch.no_grad()
def remove_channels_(
    model: nn.Module, kept: Sequence[tuple[ChannelGroup, Tensor]], optimizer: Optimizers = None
) -> None:
    """Keep only some channels of each group, in every tensor of the model and of the optimizer's state.

    Modules and optimizers stay the same objects; their parameters are replaced. Re-wrap a DDP model afterwards.

    Args:
        kept: groups of this model, each with the indices of the channels that remain.

    >>> from pufferfish.lab.rivals.channel_groups import channel_groups
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> remove_channels_(net, [(channel_groups(net)[1], torch.tensor([0, 2, 5]))])
    >>> net[0].out_channels, net[1].num_features, net[3].weight.shape
    (3, 3, torch.Size([4, 3, 3, 3]))
    """
    inner, optimizers = unwrap(model), as_list(optimizer)
    check_optimizers(optimizers)
    check_optimizer_state(inner, kept, optimizers)
    for name, indices in _kept_indices(inner, kept).items():
        path, _, own = name.rpartition(".")
        layer = inner.get_submodule(path)
        old: Tensor = getattr(layer, own)
        new = _select(old.detach(), indices)
        if own not in layer._parameters:
            setattr(layer, own, new)
            continue
        new = nn.Parameter(new, old.requires_grad)
        setattr(layer, own, new)
        for opt in optimizers:
            if replace_parameters(opt.param_groups, [old], [new]) and old in opt.state:
                state = opt.state.pop(old)
                opt.state[new] = {
                    key: _select(x, indices) if _has_shape_of(x, old) else x for key, x in state.items()
                }
    for group, _ in kept:
        for name in group.writers + group.norms + group.readers:
            _update_size_attributes(inner.get_submodule(name))


def _kept_indices(
    model: nn.Module, kept: Sequence[tuple[ChannelGroup, Tensor]]
) -> dict[str, dict[int, Tensor]]:
    """Return the remaining indices by name of the parameter or buffer and by dimension."""
    indices: dict[str, dict[int, Tensor]] = {}
    for group, channels in kept:
        for name, own, dim in _channel_dimensions(group):
            x = getattr(model.get_submodule(name), own, None)
            if not isinstance(x, Tensor) or x.dim() <= dim:
                continue
            width = x.shape[dim] // group.size  # inputs per channel where channels are flattened
            flat = channels[:, None] * width + torch.arange(width, device=channels.device)
            indices.setdefault(f"{name}.{own}", {})[dim] = flat.flatten().to(x.device)
    return indices


def _channel_dimensions(group: ChannelGroup) -> Iterator[tuple[str, str, int]]:
    """Yield (layer, tensor, dimension) of everything that is indexed by the group's channels."""
    for name in group.writers:
        yield from ((name, own, 0) for own in ("weight", "bias"))
    for name in group.norms:
        yield from ((name, own, 0) for own in ("weight", "bias", "running_mean", "running_var"))
    for name in group.readers:
        yield name, "weight", 1


def _select(x: Tensor, indices: dict[int, Tensor]) -> Tensor:
    """Select indices by dimension; keeps the memory format."""
    channels_last = (
        x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    )
    for dim, index in indices.items():
        x = x.index_select(dim, index.to(x.device))
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _has_shape_of(x: Any, parameter: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape == parameter.shape


def check_optimizer_state(
    model: nn.Module, kept: Sequence[tuple[ChannelGroup, Tensor]], optimizers: Sequence[optim.Optimizer]
) -> None:
    """Raise ValueError for optimizer state that does not have the shape of its parameter."""
    affected = _kept_indices(model, kept)
    for name, parameter in model.named_parameters():
        for opt in optimizers if name in affected else ():
            for key, x in opt.state.get(parameter, {}).items():
                if isinstance(x, Tensor) and x.numel() > 1 and not _has_shape_of(x, parameter):
                    raise ValueError(
                        f"{name}: {type(opt).__name__} keeps {key!r} in another shape than the parameter's, so its "
                        "channels cannot be removed; use an optimizer such as SGD or AdamW"
                    )


def _update_size_attributes(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, _BatchNorm):
        per_channel = layer.weight if layer.affine else layer.running_mean
        assert per_channel is not None
        layer.num_features = len(per_channel)
