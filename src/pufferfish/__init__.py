"""Pufferfish: train networks that are already small, on many machines over ordinary networks."""

from . import layers, testing
from .checkpoint import Checkpoint, Resumed, skip_batches
from .compress import (
    DGC,
    QSGD,
    Accordion,
    Aggregator,
    AlternatingPowerSGD,
    Atomo,
    BFloat16,
    BlockFP8,
    BlockInt8,
    BlockRandomK,
    EFSignSGD,
    Float16,
    NoCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    SignSGD,
    Signum,
    TernGrad,
    Threshold,
    TopK,
    compress,
)
from .cost import Totals
from .decay import FrobeniusDecay
from .exact import exact_
from .factorize import factorize_, merge_, plan_of, reshape_
from .files import load, save
from .finite import FiniteGuard
from .layers import register
from .local import LocalSteps
from .lr import Rewarm
from .measure import Breakdown, RunLog, diagnose
from .plan import Entry, Plan
from .planning import plan, resolve, spectra
from .rank import Budget, Energy, Fixed, Ratio, Rule, StableRank
from .report import Report
from .state import factorize_state_dict, merge_state_dict
from .switch import Switch
from .when import AtEpoch, AtFraction, AtStep, Position, RanksSettle

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "QSGD",
    "Accordion",
    "Aggregator",
    "AlternatingPowerSGD",
    "AtEpoch",
    "AtFraction",
    "AtStep",
    "Atomo",
    "BFloat16",
    "BlockFP8",
    "BlockInt8",
    "BlockRandomK",
    "Breakdown",
    "Budget",
    "Checkpoint",
    "EFSignSGD",
    "Energy",
    "Entry",
    "FiniteGuard",
    "Fixed",
    "Float16",
    "FrobeniusDecay",
    "LocalSteps",
    "NoCompression",
    "OneBitSGD",
    "Plan",
    "Position",
    "PowerSGD",
    "RandomK",
    "RanksSettle",
    "Ratio",
    "Report",
    "Resumed",
    "Rewarm",
    "Rule",
    "RunLog",
    "SignSGD",
    "Signum",
    "StableRank",
    "Switch",
    "TernGrad",
    "Threshold",
    "TopK",
    "Totals",
    "compress",
    "diagnose",
    "exact_",
    "factorize_",
    "factorize_state_dict",
    "layers",
    "load",
    "merge_",
    "merge_state_dict",
    "plan",
    "plan_of",
    "register",
    "reshape_",
    "resolve",
    "save",
    "skip_batches",
    "spectra",
    "testing",
]
