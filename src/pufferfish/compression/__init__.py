"""Gradient compression: a method, error feedback, one engine, and its hooks for DDP and FSDP2."""

from .check_compressor import check_compressor
from .ddp_hook import DDPHook, compress
from .engine import Engine
from .fsdp2_hook import FSDP2Hook
from .meter import Meter
from .method import Gather, Method, Scatter, StepContext, Sum
from .methods.accordion import Accordion
from .methods.atomo import Atomo
from .methods.blockrandom import BlockRandomK
from .methods.blocks import BlockFP8, BlockInt8
from .methods.casts import BFloat16, Float16, NoCompression
from .methods.dgc import DGC
from .methods.int4 import Int2, Int4
from .methods.loco import LoCo
from .methods.onebit import OneBitSGD
from .methods.powersgd import AlternatingPowerSGD, PowerSGD
from .methods.qsgd import QSGD
from .methods.sign import SignSGD
from .methods.signum import EFSignSGD, Signum
from .methods.sparse import RandomK, TopK
from .methods.sparseloco import SparseLoCo
from .methods.terngrad import TernGrad
from .methods.threshold import Threshold
from .settings import Settings
from .simulated import Simulated

__all__ = [
    "DGC",
    "QSGD",
    "Accordion",
    "AlternatingPowerSGD",
    "Atomo",
    "BFloat16",
    "BlockFP8",
    "BlockInt8",
    "BlockRandomK",
    "DDPHook",
    "EFSignSGD",
    "Engine",
    "FSDP2Hook",
    "Float16",
    "Gather",
    "Int2",
    "Int4",
    "LoCo",
    "Meter",
    "Method",
    "NoCompression",
    "OneBitSGD",
    "PowerSGD",
    "RandomK",
    "Scatter",
    "Settings",
    "SignSGD",
    "Signum",
    "Simulated",
    "SparseLoCo",
    "StepContext",
    "Sum",
    "TernGrad",
    "Threshold",
    "TopK",
    "check_compressor",
    "compress",
]
