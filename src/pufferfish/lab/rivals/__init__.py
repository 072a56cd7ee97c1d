"""Methods that the paper compares with: pruning by lottery and Early-Bird tickets."""

from .early_bird import EarlyBird
from .lottery_ticket import LotteryTicket

__all__ = ["EarlyBird", "LotteryTicket"]
