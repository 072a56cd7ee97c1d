"""What the paper compares with: optimizers for large batches, and tickets found by pruning."""

from .lamb import LAMB
from .lars import LARS
from .sam import SAM
from .scaling import linear_scaling

__all__ = ["LAMB", "LARS", "SAM", "linear_scaling"]
