"""Low-rank layers: ordinary modules with two ordinary children, `down` and `up`."""

from .attention import LowRankMultiheadAttention
from .base import LowRank, low_rank_type, meta_copy, register
from .conv import LowRankConv, LowRankConvTranspose
from .linear import LowRankConv1D, LowRankLinear
from .matrix import FactorMap, Matrix
from .recurrent import GateFactors, LowRankGRU, LowRankLSTM, LowRankRNN

__all__ = [
    "FactorMap",
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
    "low_rank_type",
    "meta_copy",
    "register",
]
