"""One training loop for all tasks: on one device, on many, or on one that plays many. It resumes by itself."""

from .loop import train
from .optimizer import optimizer
from .settings import Settings
from .spectra import layers

__all__ = ["Settings", "layers", "optimizer", "train"]
