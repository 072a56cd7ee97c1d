"""What the paper compares with: optimizers for large batches, and tickets found by pruning."""

from .earlybird import EarlyBird
from .lamb import LAMB
from .lars import LARS
from .lottery import LotteryTicket
from .sam import SAM
from .scaling import linear_scaling

__all__ = ["LAMB", "LARS", "SAM", "EarlyBird", "LotteryTicket", "linear_scaling"]
