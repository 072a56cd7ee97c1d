"""Methods that the paper compares with: pruning by lottery and Early-Bird tickets."""

from .lottery_ticket import LotteryTicket
from .pruning import EarlyBird

__all__ = ["EarlyBird", "LotteryTicket"]
