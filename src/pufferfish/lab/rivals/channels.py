"""Removing channels from a model: groups of channels that belong together, the norms that judge them, and the removal."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from ...layers import LowRank, meta_copy
from ...layers.names import unwrap
from ...lowrank.optimizers import Optimizers, check_optimizers
from ...lowrank.rewrite import replace_parameters


@torch.no_grad()
def remove_channels_(
    model: nn.Module, kept: Sequence[tuple[ChannelGroup, Tensor]], optimizer: Optimizers = None
) -> None:
    """Keep only some channels of each group, in every tensor of the model and of the optimizer's state.

    Modules and optimizers stay the same objects; their parameters are replaced. Re-wrap a DDP model afterwards.

    Args:
        kept: groups of this model, each with the indices of the channels that remain.

    >>> from pufferfish.lab.rivals.channels import channel_groups
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> remove_channels_(net, [(channel_groups(net)[1], torch.tensor([0, 2, 5]))])
    >>> net[0].out_channels, net[1].num_features, net[3].weight.shape
    (3, 3, torch.Size([4, 3, 3, 3]))
    """
    inner, optimizers = unwrap(model), check_optimizers(optimizer)
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


_ADDITIONS = {operator.add, operator.iadd, torch.add}
_FLATTEN = {torch.flatten, "flatten"}
#: Act on each channel separately and keep a channel of zeros at zero.
_CHANNELWISE = {F.relu, torch.relu, "relu", F.dropout, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d}
_CHANNELWISE_LAYERS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Identity, nn.Dropout, nn.Dropout2d,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip
_KNOWN = (nn.Conv2d, nn.Linear, _BatchNorm, nn.Flatten, nn.ModuleList, nn.ModuleDict, *_CHANNELWISE_LAYERS)


@dataclass
class ChannelGroup:
    """Channels that can only be removed together, and the names of the layers that use them.

    Args:
        size: number of channels.
        writers: convolutions and linear layers that output them.
        norms: batch norms that scale them.
        readers: convolutions and linear layers that take them as input.
        fixed: whether they are inputs or outputs of the model.
    """

    size: int
    writers: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    fixed: bool = False


def channel_groups(model: nn.Module) -> list[ChannelGroup]:
    """Return the groups of a model of convolutions, batch norms, linear layers, additions and pooling.

    Any other operation raises ValueError with the name of the layer.

    >>> from pufferfish.lab.models import resnet18
    >>> first = channel_groups(resnet18())[1]
    >>> first.size, first.writers, first.norms
    (64, ['conv1', 'layer1.0.conv2', 'layer1.1.conv2'], ['layer1.0.bn2', 'layer1.1.bn2'])
    """
    bare = meta_copy(unwrap(model))  # without hooks, which the trace must not call
    tracer = fx.Tracer()
    for name, layer in bare.named_modules():
        if isinstance(layer, LowRank):
            raise ValueError(
                f"{name}: channels of a low-rank layer cannot be removed; call pf.merge_ on the model first"
            )
        if tracer.is_leaf_module(layer, name) and not isinstance(layer, _KNOWN):
            raise _unsupported(name, type(layer).__name__)
    try:
        graph = tracer.trace(bare)
    except Exception as error:  # torch.fx runs the model's own code, which may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{type(bare).__name__}: its forward cannot be traced ({reason}), so its channels cannot be "
            "grouped; only plain convolutional networks are supported"
        ) from None
    return _GraphWalk(bare, graph).groups()


class _GraphWalk:
    """Visits the graph in the order of computation and assigns the channels of every value to a group."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.model, self.graph = model, graph
        self.group_of: dict[fx.Node, ChannelGroup] = {}
        self.flat: set[fx.Node] = set()  # values without height and width
        self.seen: set[str] = set()
        self.owner: dict[int, str] = {}  # layer by id of its parameter

    def groups(self) -> list[ChannelGroup]:
        for node in self.graph.nodes:
            self._visit(node)
        groups = {id(group): group for group in self.group_of.values()}
        position = {name: i for i, (name, _) in enumerate(self.model.named_modules())}
        for group in groups.values():
            for names in (group.writers, group.norms, group.readers):
                names.sort(key=position.__getitem__)
        return list(groups.values())

    def _visit(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            self.group_of[node] = ChannelGroup(0, fixed=True)
        elif node.op == "output":
            for value in inputs:
                self.group_of[value].fixed = True
        elif node.op == "call_module":
            self._layer(node, str(node.target), self.model.get_submodule(str(node.target)))
        elif node.target in _ADDITIONS and len(inputs) == len(node.args) == 2:
            self._add(node, *inputs)
        elif node.target in _FLATTEN and node.args[1:] == (1,):
            self._keep_group(node)
            self.flat.add(node)
        elif node.target in _CHANNELWISE and len(inputs) == 1:
            self._keep_group(node)
        else:
            stack = list(node.meta.get("nn_module_stack", {})) or ["the model"]
            operation = getattr(node.target, "__name__", node.target)
            raise _unsupported(stack[-1], str(operation))

    def _layer(self, node: fx.Node, name: str, layer: nn.Module) -> None:
        group = self.group_of[node.all_input_nodes[0]]
        flat = node.all_input_nodes[0] in self.flat
        if isinstance(layer, nn.Conv2d | nn.Linear | _BatchNorm):
            self._check_used_once(name, layer)
        if isinstance(layer, nn.Conv2d):
            if layer.groups != 1:
                raise ValueError(
                    f"{name}: channels of a convolution with {layer.groups} groups cannot be removed"
                )
            self._check_input(name, layer.in_channels == group.size or group.size == 0)
            self._new_group(node, name, group, layer.out_channels)
        elif isinstance(layer, nn.Linear):
            self._check_input(name, group.fixed or (flat and layer.in_features % group.size == 0))
            self._new_group(node, name, group, layer.out_features)
            self.flat.add(node)
        elif isinstance(layer, _BatchNorm):
            self._check_input(name, layer.num_features == group.size or group.size == 0)
            group.norms.append(name)
            self._keep_group(node)
        elif isinstance(layer, nn.Flatten) and layer.start_dim == 1:
            self._keep_group(node)
            self.flat.add(node)
        elif isinstance(layer, _CHANNELWISE_LAYERS):
            self._keep_group(node)
        else:
            raise _unsupported(name, str(layer))

    def _new_group(self, node: fx.Node, name: str, read: ChannelGroup, size: int) -> None:
        read.readers.append(name)
        self.group_of[node] = ChannelGroup(size, writers=[name])

    def _keep_group(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        self.group_of[node] = self.group_of[source]
        if source in self.flat:
            self.flat.add(node)

    def _add(self, node: fx.Node, one: fx.Node, other: fx.Node) -> None:
        a, b = self.group_of[one], self.group_of[other]
        if a.size != b.size or (one in self.flat) != (other in self.flat):
            raise ValueError(
                f"{node.name}: {a.size} and {b.size} channels are added, so they cannot be removed"
            )
        self._keep_group(node)
        if a is b:
            return
        a.writers += b.writers
        a.norms += b.norms
        a.readers += b.readers
        a.fixed |= b.fixed
        self.group_of = {value: a if group is b else group for value, group in self.group_of.items()}

    def _check_used_once(self, name: str, layer: nn.Module) -> None:
        for p in layer.parameters():
            first = self.owner.setdefault(id(p), name)
            if first != name or name in self.seen:
                raise ValueError(
                    f"{name}: it is used twice, or shares its weight with {first}, which is not supported"
                )
        self.seen.add(name)

    @staticmethod
    def _check_input(name: str, fits: bool) -> None:
        if not fits:
            raise ValueError(
                f"{name}: its input must have one value per channel, or be flattened channel by channel"
            )


def _unsupported(name: str, operation: str) -> ValueError:
    return ValueError(
        f"{name}: {operation} is not supported, so channels cannot be removed; supported are "
        "convolutional networks of plain layers and additions, such as ResNets and VGGs"
    )


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
