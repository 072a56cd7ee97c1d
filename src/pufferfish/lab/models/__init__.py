"""The paper's models, a GPT and a Llama; `REFERENCES` has each by name."""

from .gpt import GPT
from .llama import Llama
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
    "Llama",
    "Reference",
    "Transformer",
    "resnet18",
    "resnet50",
    "wide_resnet50_2",
]
