"""Gradient compression: a method, error feedback, one engine, and its hooks for DDP and FSDP2."""

from .check_compressor import check_compressor
from .ddp_hook import DDPHook, compress
from .engine import Engine, Step
from .exchange import Group, Meter, Transport
from .fsdp2_hook import FSDP2Hook
from .method import Gather, Kept, Method, Scatter, StepContext, Sum
from .methods.accordion import Accordion
from .methods.changed import Changed
from .methods.powersgd import AlternatingPowerSGD, Atomo, PowerSGD
from .methods.quantized import QSGD, BlockFP8, BlockInt8, Int2, Int4, LoCo, TernGrad
from .methods.signs import EFSignSGD, OneBitSGD, SignSGD, Signum
from .methods.sparse import DGC, BlockRandomK, RandomK, SparseLoCo, Threshold, TopK
from .methods.sums import BFloat16, Float16, NoCompression
from .settings import Methods, Settings
from .sharded import ShardedHook
from .simulated import OneWorker, Simulated

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
    "Group",
    "Int2",
    "Int4",
    "Kept",
    "LoCo",
    "Meter",
    "Method",
    "Methods",
    "NoCompression",
    "OneBitSGD",
    "OneWorker",
    "PowerSGD",
    "RandomK",
    "Scatter",
    "Settings",
    "ShardedHook",
    "SignSGD",
    "Signum",
    "Simulated",
    "SparseLoCo",
    "Step",
    "StepContext",
    "Sum",
    "TernGrad",
    "Threshold",
    "TopK",
    "Transport",
    "check_compressor",
    "compress",
]
