"""Save and resume a whole training job, across the switch and across a crash."""

from .checkpoint import Checkpoint, Resumed
from .process import skip_batches

__all__ = ["Checkpoint", "Resumed", "skip_batches"]
