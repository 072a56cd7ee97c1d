"""The paper's models and a small GPT; `REFERENCES` has each by name."""

from .gpt import GPT
from .lstm import LSTMLanguageModel
from .reference import REFERENCES, Reference
from .resnet import resnet18, resnet50, wide_resnet50_2
from .transformer import Transformer
from .vgg import VGG19

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
