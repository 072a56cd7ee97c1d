"""One training loop for all tasks: in one process, on several workers, or with simulated workers. It resumes by itself."""

from .optimizers import build_optimizer
from .settings import RunSettings
from .trainer import train

__all__ = ["RunSettings", "build_optimizer", "train"]
