"""One training loop for all tasks: in one process, on several workers, or with simulated workers. It resumes by itself."""

from .build_optimizer import build_optimizer
from .run_settings import RunSettings
from .train import train

__all__ = ["RunSettings", "build_optimizer", "train"]
