"""Gradient compression: a method (what), a memory (error feedback), a transport (which collective), one DDP hook."""

from .aggregator import Aggregator
from .check_compressor import check_compressor
from .ddp_hook import Hook, compress
from .fsdp2_hook import ShardedHook
from .meter import Meter
from .method import Gather, Method, Scatter, Sum
from .methods.accordion import Accordion
from .methods.alternating import AlternatingPowerSGD
from .methods.atomo import Atomo
from .methods.blockrandom import BlockRandomK
from .methods.blocks import BlockFP8, BlockInt8
from .methods.casts import BFloat16, Float16, NoCompression
from .methods.dgc import DGC
from .methods.onebit import OneBitSGD
from .methods.powersgd import PowerSGD
from .methods.qsgd import QSGD
from .methods.sign import SignSGD
from .methods.signum import EFSignSGD, Signum
from .methods.sparse import RandomK, TopK
from .methods.terngrad import TernGrad
from .methods.threshold import Threshold
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
    "check_compressor",
    "compress",
]
