"""Gradient compression: a method, error feedback, one engine, and its hooks for DDP and FSDP2."""

from .check_compressor import check_compressor
from .ddp_hook import DDPHook, compress
from .engine import Engine
from .exchange import Meter
from .fsdp2_hook import FSDP2Hook
from .method import Gather, Kept, Method, Scatter, StepContext, Sum
from .methods.accordion import Accordion
from .methods.changed import Changed
from .methods.powersgd import AlternatingPowerSGD, Atomo, PowerSGD
from .methods.quantized import QSGD, BlockFP8, BlockInt8, Int2, Int4, LoCo, TernGrad
from .methods.signs import EFSignSGD, OneBitSGD, SignSGD, Signum
from .methods.sparse import DGC, BlockRandomK, RandomK, SparseLoCo, Threshold, TopK
from .methods.sums import BFloat16, Float16, NoCompression
from .settings import Settings
from .sharded import ShardedHook
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
    "Changed",
    "DDPHook",
    "EFSignSGD",
    "Engine",
    "FSDP2Hook",
    "Float16",
    "Gather",
    "Int2",
    "Int4",
    "Kept",
    "LoCo",
    "Meter",
    "Method",
    "NoCompression",
    "OneBitSGD",
    "PowerSGD",
    "RandomK",
    "Scatter",
    "Settings",
    "ShardedHook",
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
