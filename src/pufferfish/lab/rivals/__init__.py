"""Methods that the paper compares with: optimizers for large batches, and pruning by lottery and Early-Bird tickets."""

from .early_bird import EarlyBird
from .lamb import LAMB
from .lars import LARS
from .lottery_ticket import LotteryTicket
from .sam import SAM

__all__ = ["LAMB", "LARS", "SAM", "EarlyBird", "LotteryTicket"]
