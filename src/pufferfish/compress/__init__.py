"""Gradient compression: a method (what), a memory (error feedback), a transport (which collective), one DDP hook."""

from .accordion import Accordion
from .aggregator import Aggregator
from .alternating import AlternatingPowerSGD
from .atomo import Atomo
from .blockrandom import BlockRandomK
from .blocks import BlockFP8, BlockInt8
from .casts import BFloat16, Float16, NoCompression
from .dgc import DGC
from .hook import Hook, compress
from .meter import Meter
from .method import Gather, Method, Scatter, Sum
from .onebit import OneBitSGD
from .powersgd import PowerSGD
from .qsgd import QSGD
from .sharded import ShardedHook
from .sign import SignSGD
from .signum import EFSignSGD, Signum
from .sparse import RandomK, TopK
from .terngrad import TernGrad
from .threshold import Threshold
from .transport import Simulated
from .turn import Turn

__all__ = [
    "DGC",
    "QSGD",
    "Accordion",
    "Aggregator",
    "AlternatingPowerSGD",
    "Atomo",
    "BFloat16",
    "BlockFP8",
    "BlockInt8",
    "BlockRandomK",
    "EFSignSGD",
    "Float16",
    "Gather",
    "Hook",
    "Meter",
    "Method",
    "NoCompression",
    "OneBitSGD",
    "PowerSGD",
    "RandomK",
    "Scatter",
    "ShardedHook",
    "SignSGD",
    "Signum",
    "Simulated",
    "Sum",
    "TernGrad",
    "Threshold",
    "TopK",
    "Turn",
    "compress",
]
