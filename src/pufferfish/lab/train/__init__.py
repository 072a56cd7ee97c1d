"""One training loop for all tasks: on one device, on many, or on one that plays many. It resumes by itself."""

from .layer_records import layers
from .loop import train
from .optimizer import optimizer
from .settings import Settings

__all__ = ["Settings", "layers", "optimizer", "train"]
