"""Making models low-rank and dense again, in memory and in files; their optimizers."""

from .factorize import plan_of
from .frobenius_decay import FrobeniusDecay
from .muon import Muon, muon_parameters
from .state_dict import factorize_state_dict, merge_state_dict

__all__ = [
    "FrobeniusDecay",
    "Muon",
    "factorize_state_dict",
    "merge_state_dict",
    "muon_parameters",
    "plan_of",
]
