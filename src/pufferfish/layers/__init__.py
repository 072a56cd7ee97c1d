"""Low-rank layers: ordinary modules with two ordinary children, and the registry that finds them."""

from .attention import LowRankMultiheadAttention
from .base import LowRank, hollow
from .conv import LowRankConv, LowRankConvTranspose
from .linear import LowRankConv1D, LowRankLinear
from .matrix import Matrix
from .recurrent import GateFactors, LowRankGRU, LowRankLSTM, LowRankRNN
from .registry import low_rank_type, register

__all__ = [
    "GateFactors",
    "LowRank",
    "LowRankConv",
    "LowRankConv1D",
    "LowRankConvTranspose",
    "LowRankGRU",
    "LowRankLSTM",
    "LowRankLinear",
    "LowRankMultiheadAttention",
    "LowRankRNN",
    "Matrix",
    "hollow",
    "low_rank_type",
    "register",
]
