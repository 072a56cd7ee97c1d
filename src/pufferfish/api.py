"""The public names of the package. `import pufferfish` imports this module when one of them is first used."""

from . import compression, layers, measure
from .checkpoint import Checkpoint, skip_batches
from .compression import compress
from .distributed.exact import exact_
from .distributed.finite_guard import FiniteGuard
from .layers import register
from .local.local_steps import LocalSteps
from .lowrank.files import load, save
from .lowrank.frobenius_decay import FrobeniusDecay
from .lowrank.muon import Muon, muon_parameters
from .lowrank.rewrite import factorize_, merge_, plan_of, reshape_
from .lowrank.state_dict import factorize_state_dict, merge_state_dict
from .measure import RunLog, diagnose
from .planning.plan import Plan, plan, resolve, spectra
from .planning.rules import Budget, Energy, Fixed, Ratio, Rule, StableRank
from .switching.moments import AtEpoch, AtFraction, AtStep, RanksSettle
from .switching.switch import Switch

__all__ = [
    "AtEpoch",
    "AtFraction",
    "AtStep",
    "Budget",
    "Checkpoint",
    "Energy",
    "FiniteGuard",
    "Fixed",
    "FrobeniusDecay",
    "LocalSteps",
    "Muon",
    "Plan",
    "RanksSettle",
    "Ratio",
    "Rule",
    "RunLog",
    "StableRank",
    "Switch",
    "compress",
    "compression",
    "diagnose",
    "exact_",
    "factorize_",
    "factorize_state_dict",
    "layers",
    "load",
    "measure",
    "merge_",
    "merge_state_dict",
    "muon_parameters",
    "plan",
    "plan_of",
    "register",
    "reshape_",
    "resolve",
    "save",
    "skip_batches",
    "spectra",
]
