"""Pufferfish: train networks that are already small, on many machines over ordinary networks."""

from . import layers
from .cost import Totals
from .factorize import factorize_, merge_, plan_of, reshape_
from .files import load, save
from .layers import register
from .lr import Rewarm
from .plan import Entry, Plan
from .planning import plan, resolve, spectra
from .rank import Budget, Energy, Fixed, Ratio, Rule, StableRank
from .report import Report
from .state import factorize_state_dict, merge_state_dict
from .switch import Switch
from .when import AtEpoch, AtFraction, AtStep, Position, RanksSettle

__version__ = "0.1.0"

__all__ = [
    "AtEpoch",
    "AtFraction",
    "AtStep",
    "Budget",
    "Energy",
    "Entry",
    "Fixed",
    "Plan",
    "Position",
    "RanksSettle",
    "Ratio",
    "Report",
    "Rewarm",
    "Rule",
    "StableRank",
    "Switch",
    "Totals",
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
    "spectra",
]
