"""Pufferfish: train networks that are already small, on many machines over ordinary networks."""

from . import layers
from .cost import Totals
from .factorize import factorize_, merge_, reshape_
from .layers import register
from .plan import Entry, Plan
from .planning import plan, resolve, spectra
from .rank import Budget, Energy, Fixed, Ratio, Rule, StableRank

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Energy",
    "Entry",
    "Fixed",
    "Plan",
    "Ratio",
    "Rule",
    "StableRank",
    "Totals",
    "factorize_",
    "layers",
    "merge_",
    "plan",
    "register",
    "reshape_",
    "resolve",
    "spectra",
]
