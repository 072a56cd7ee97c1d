"""The reference models: how to build each, what to feed it, and what the paper leaves full-rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pufferfish.lab.models.gpt import GPT
from pufferfish.lab.models.lstm import LSTMLanguageModel
from pufferfish.lab.models.resnet import resnet18, resnet50, wide_resnet50_2
from pufferfish.lab.models.transformer import Transformer
from pufferfish.lab.models.vgg import VGG19

__all__ = [
    "GPT",
    "REFERENCES",
    "VGG19",
    "LSTMLanguageModel",
    "Reference",
    "Transformer",
    "resnet18",
    "resnet50",
    "wide_resnet50_2",
]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One model of the paper.

    `example` makes the positional arguments of one forward, on the default device. `keep` are fnmatch
    patterns of the layers that stay full-rank in the hybrid model.
    """

    build: Callable[[], nn.Module]
    example: Callable[[], tuple[Tensor, ...]]
    keep: tuple[str, ...]


def _cifar() -> tuple[Tensor, ...]:
    return (torch.randn(128, 3, 32, 32),)


def _imagenet() -> tuple[Tensor, ...]:
    return (torch.randn(32, 3, 224, 224),)


def _words() -> tuple[Tensor, ...]:
    return (torch.randint(33_278, (35, 20)),)


def _sentences() -> tuple[Tensor, ...]:
    return torch.randint(1, 9521, (32, 24)), torch.randint(1, 9521, (32, 24))


def _bytes() -> tuple[Tensor, ...]:
    return (torch.randint(256, (8, 256)),)


_IMAGENET_KEEP = ("conv1", "layer[123].*", "fc")

REFERENCES: dict[str, Reference] = {
    "vgg19": Reference(build=VGG19, example=_cifar, keep=("features.conv[1-9]", "classifier.fc3")),
    "vgg19_one_fc": Reference(
        build=lambda: VGG19(fcs=1), example=_cifar, keep=("features.conv[1-9]", "classifier.fc1")
    ),
    "resnet18": Reference(
        build=resnet18, example=_cifar, keep=("conv1", "layer1.0.*", "*.downsample.*", "fc")
    ),
    "resnet50": Reference(build=resnet50, example=_imagenet, keep=_IMAGENET_KEEP),
    "wide_resnet50_2": Reference(build=wide_resnet50_2, example=_imagenet, keep=_IMAGENET_KEEP),
    "lstm": Reference(build=LSTMLanguageModel, example=_words, keep=("decoder",)),
    "transformer": Reference(build=Transformer, example=_sentences, keep=("encoder.0.*", "decoder.0.*")),
    "gpt": Reference(build=GPT, example=_bytes, keep=("blocks.0.*",)),
}
