"""The paper's models, a GPT and a Llama; `REFERENCES` has each by name."""

from .convnets import VGG19, resnet18, resnet50, wide_resnet50_2
from .decoders import GPT, Llama
from .reference import REFERENCES, Reference
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
