"""`channel_groups`: channels of a network that must be removed together because they are added, found by a `torch.fx` trace."""

import operator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...layers import LowRank, meta_copy
from ...layers.names import unwrap

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
