"""Low-rank layers: ordinary modules with two ordinary children, `down` and `up`."""

from .attention import LowRankMultiheadAttention
from .base import LowRank, low_rank_type, meta_copy, register
from .conv import LowRankConv, LowRankConvTranspose
from .embedding import LowRankEmbedding
from .experts import LowRankExperts
from .grouped import GroupedLinear, Routing
from .linear import LowRankConv1D, LowRankLinear
from .matrix import FactorMap, Matrix, Part
from .names import inside, local_part, matches, named_modules, own_keys, own_name, rebuilt, unwrap
from .recurrent import GateFactors, LowRankGRU, LowRankLSTM, LowRankRNN
from .shared_input import SharedInput

__all__ = [
    "FactorMap",
    "GateFactors",
    "GroupedLinear",
    "LowRank",
    "LowRankConv",
    "LowRankConv1D",
    "LowRankConvTranspose",
    "LowRankEmbedding",
    "LowRankExperts",
    "LowRankGRU",
    "LowRankLSTM",
    "LowRankLinear",
    "LowRankMultiheadAttention",
    "LowRankRNN",
    "Matrix",
    "Part",
    "Routing",
    "SharedInput",
    "inside",
    "local_part",
    "low_rank_type",
    "matches",
    "meta_copy",
    "named_modules",
    "own_keys",
    "own_name",
    "rebuilt",
    "register",
    "unwrap",
]
