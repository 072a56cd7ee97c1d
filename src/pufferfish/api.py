"""The public names of the package. `import pufferfish` imports this module when one of them is first used."""

from . import compression, distributed, layers, lowrank, measure, planning
from .checkpoint import Checkpoint
from .compression import compress
from .layers import register
from .local.local_steps import LocalSteps
from .lowrank.factorize import factorize_, merge_, reshape_
from .lowrank.files import load, save
from .measure import RunLog, diagnose
from .planning import Budget, Energy, Fixed, Plan, Ratio, StableRank, plan, resolve
from .switching.moments import AtEpoch, AtFraction, AtStep, RanksSettle
from .switching.switch import Switch

__all__ = [
    "AtEpoch",
    "AtFraction",
    "AtStep",
    "Budget",
    "Checkpoint",
    "Energy",
    "Fixed",
    "LocalSteps",
    "Plan",
    "RanksSettle",
    "Ratio",
    "RunLog",
    "StableRank",
    "Switch",
    "compress",
    "compression",
    "diagnose",
    "distributed",
    "factorize_",
    "layers",
    "load",
    "lowrank",
    "measure",
    "merge_",
    "plan",
    "planning",
    "register",
    "reshape_",
    "resolve",
    "save",
]
