"""Which channels of a network stand or fall together: those that are added to one another, read off a `torch.fx` trace."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...layers import LowRank, hollow
from ...layers.names import unwrap

_SUMS = {operator.add, operator.iadd, torch.add}
_FLAT = {torch.flatten, "flatten"}
#: Each channel for itself, and a channel of zeros stays one.
_EACH = {F.relu, torch.relu, "relu", F.dropout, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d}
_EACH_LAYER = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Identity, nn.Dropout, nn.Dropout2d,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip
_KNOWN = (nn.Conv2d, nn.Linear, _BatchNorm, nn.Flatten, nn.ModuleList, nn.ModuleDict, *_EACH_LAYER)


@dataclass
class Group:
    """Channels that are removed together, and the layers, by name, that know of them.

    Args:
        size: how many channels.
        writers: convolutions and linear layers that make them.
        norms: batch norms that scale them.
        readers: convolutions and linear layers that take them in.
        fixed: they are the model's own inputs or outputs.
    """

    size: int
    writers: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    fixed: bool = False


def groups(model: nn.Module) -> list[Group]:
    """The groups of a model that is made of convolutions, batch norms, linear layers, sums and pooling.

    Anything else is a ValueError that names the layer.

    >>> from pufferfish.lab.models import resnet18
    >>> first = groups(resnet18())[1]
    >>> first.size, first.writers, first.norms
    (64, ['conv1', 'layer1.0.conv2', 'layer1.1.conv2'], ['layer1.0.bn2', 'layer1.1.bn2'])
    """
    bare = hollow(unwrap(model))  # its hooks are not for the trace
    tracer = fx.Tracer()
    for name, layer in bare.named_modules():
        if isinstance(layer, LowRank):
            raise ValueError(
                f"{name}: channels of a low-rank layer are not removed; pf.merge_ the model first"
            )
        if tracer.is_leaf_module(layer, name) and not isinstance(layer, _KNOWN):
            raise _unknown(name, type(layer).__name__)
    try:
        graph = tracer.trace(bare)
    except Exception as error:  # torch.fx runs the model's own code, which may fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{type(bare).__name__}: its forward cannot be traced ({reason}), so which channels belong "
            "together is not known; this works for plain convolutional networks"
        ) from None
    return _Walk(bare, graph).groups()


class _Walk:
    """Through the graph in the order of computation; every value has the group that its channels are in."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.model, self.graph = model, graph
        self.of: dict[fx.Node, Group] = {}
        self.flat: set[fx.Node] = set()  # values without height and width
        self.seen: set[str] = set()
        self.tensors: dict[int, str] = {}

    def groups(self) -> list[Group]:
        for node in self.graph.nodes:
            self._visit(node)
        found = {id(group): group for group in self.of.values()}
        place = {name: i for i, (name, _) in enumerate(self.model.named_modules())}
        for group in found.values():
            for names in (group.writers, group.norms, group.readers):
                names.sort(key=place.__getitem__)
        return list(found.values())

    def _visit(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            self.of[node] = Group(0, fixed=True)
        elif node.op == "output":
            for value in inputs:
                self.of[value].fixed = True
        elif node.op == "call_module":
            self._layer(node, str(node.target), self.model.get_submodule(str(node.target)))
        elif node.target in _SUMS and len(inputs) == len(node.args) == 2:
            self._sum(node, *inputs)
        elif node.target in _FLAT and node.args[1:] == (1,):
            self._same(node)
            self.flat.add(node)
        elif node.target in _EACH and len(inputs) == 1:
            self._same(node)
        else:
            stack = list(node.meta.get("nn_module_stack", {})) or ["the model"]
            what = getattr(node.target, "__name__", node.target)
            raise _unknown(stack[-1], str(what))

    def _layer(self, node: fx.Node, name: str, layer: nn.Module) -> None:
        group = self.of[node.all_input_nodes[0]]
        flat = node.all_input_nodes[0] in self.flat
        if isinstance(layer, nn.Conv2d | nn.Linear | _BatchNorm):
            self._once(name, layer)
        if isinstance(layer, nn.Conv2d):
            if layer.groups != 1:
                raise ValueError(
                    f"{name}: a convolution in {layer.groups} groups, whose channels are not removed"
                )
            self._fits(name, layer.in_channels == group.size or group.size == 0)
            self._writes(node, name, group, layer.out_channels)
        elif isinstance(layer, nn.Linear):
            self._fits(name, group.fixed or (flat and layer.in_features % group.size == 0))
            self._writes(node, name, group, layer.out_features)
            self.flat.add(node)
        elif isinstance(layer, _BatchNorm):
            self._fits(name, layer.num_features == group.size or group.size == 0)
            group.norms.append(name)
            self._same(node)
        elif isinstance(layer, nn.Flatten) and layer.start_dim == 1:
            self._same(node)
            self.flat.add(node)
        elif isinstance(layer, _EACH_LAYER):
            self._same(node)
        else:
            raise _unknown(name, str(layer))

    def _writes(self, node: fx.Node, name: str, read: Group, size: int) -> None:
        read.readers.append(name)
        self.of[node] = Group(size, writers=[name])

    def _same(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        self.of[node] = self.of[source]
        if source in self.flat:
            self.flat.add(node)

    def _sum(self, node: fx.Node, one: fx.Node, other: fx.Node) -> None:
        a, b = self.of[one], self.of[other]
        if a.size != b.size or (one in self.flat) != (other in self.flat):
            raise ValueError(
                f"{node.name}: channels of {a.size} and {b.size} are added; they cannot be removed"
            )
        self._same(node)
        if a is b:
            return
        a.writers += b.writers
        a.norms += b.norms
        a.readers += b.readers
        a.fixed |= b.fixed
        self.of = {value: a if group is b else group for value, group in self.of.items()}

    def _once(self, name: str, layer: nn.Module) -> None:
        for p in layer.parameters():
            first = self.tensors.setdefault(id(p), name)
            if first != name or name in self.seen:
                raise ValueError(
                    f"{name}: it is used twice, or shares its weight with {first}; that is not followed"
                )
        self.seen.add(name)

    @staticmethod
    def _fits(name: str, right: bool) -> None:
        if not right:
            raise ValueError(
                f"{name}: its input is not one number a channel, or not flattened channel by channel"
            )


def _unknown(name: str, what: str) -> ValueError:
    return ValueError(
        f"{name}: what {what} does to channels is not known, so they cannot be removed; this works for "
        "convolutional networks of plain layers and sums, such as ResNets and VGGs"
    )
