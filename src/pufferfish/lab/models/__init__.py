"""The paper's models, a GPT and a Llama; `REFERENCES` has each by name, with an example input and the layers that stay full-rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .convnets import VGG19, resnet18, resnet50, wide_resnet50_2
from .decoders import GPT, Llama
from .sequences import LSTMLanguageModel, Transformer

__all__ = [
    "GPT",
    "REFERENCES",
    "VGG19",
    "LSTMLanguageModel",
    "Llama",
    "Reference",
    "Transformer",
    "resnet18",
    "resnet50",
    "wide_resnet50_2",
]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A model of the paper, or a language model.

    >>> sum(p.numel() for p in REFERENCES["resnet18"].build(width=0.5).parameters())
    2797546
    """

    build: Callable[..., nn.Module]  # takes `width`, a factor on the sizes of all layers: 1.0 by default
    example: Callable[[], tuple[Tensor, ...]]  # positional arguments of a forward pass, on the default device
    keep: tuple[str, ...]  # fnmatch patterns of the layers that stay full-rank in the hybrid model


def _cifar() -> tuple[Tensor, ...]:
    return (torch.randn(128, 3, 32, 32),)


def _imagenet() -> tuple[Tensor, ...]:
    return (torch.randn(32, 3, 224, 224),)


def _sentences() -> tuple[Tensor, ...]:
    return torch.randint(1, 9521, (32, 24)), torch.randint(1, 9521, (32, 24))


def _bytes() -> tuple[Tensor, ...]:
    return (torch.randint(256, (8, 256)),)


_IMAGENET_KEEP = ("conv1", "layer[123].*", "fc")

REFERENCES: dict[str, Reference] = {
    "vgg19": Reference(build=VGG19, example=_cifar, keep=("features.conv[1-9]", "classifier.fc3")),
    "vgg19_one_fc": Reference(
        build=partial(VGG19, fcs=1), example=_cifar, keep=("features.conv[1-9]", "classifier.fc1")
    ),
    "resnet18": Reference(
        build=resnet18, example=_cifar, keep=("conv1", "layer1.0.*", "*.downsample.*", "fc")
    ),
    "resnet50": Reference(build=resnet50, example=_imagenet, keep=_IMAGENET_KEEP),
    "wide_resnet50_2": Reference(build=wide_resnet50_2, example=_imagenet, keep=_IMAGENET_KEEP),
    "lstm": Reference(
        build=LSTMLanguageModel, example=lambda: (torch.randint(33_278, (35, 20)),), keep=("decoder",)
    ),
    "transformer": Reference(build=Transformer, example=_sentences, keep=("encoder.0.*", "decoder.0.*")),
    "gpt": Reference(build=GPT, example=_bytes, keep=("blocks.0.*",)),
    "llama": Reference(build=Llama, example=_bytes, keep=("blocks.0.*",)),
}
