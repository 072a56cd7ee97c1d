"""Plans: which layers become low-rank, at which ranks, and their cost."""

from . import svd
from .entries import LITTLE, Entry, Plan, Totals, check_is_plan
from .json_file import errors_name, read_json, write_text
from .planner import as_patterns, factorizable, matrix_spectrum, plan, resolve, spectra, totals
from .profile import Example, Profile, autocast_context, profile, run_example
from .rules import (
    Budget,
    Energy,
    Fixed,
    RankLike,
    Ratio,
    Rule,
    StableRank,
    apply_rules,
    as_rule,
    stable_rank,
)
from .text import Table, display_progress, obstacles, progress, track
from .timing import Timing

__all__ = [
    "LITTLE", "Budget", "Energy", "Entry", "Example", "Fixed", "Plan", "Profile", "RankLike", "Ratio", "Rule", "StableRank",
    "Table", "Timing", "Totals", "apply_rules", "as_patterns", "as_rule", "autocast_context", "check_is_plan",
    "display_progress", "errors_name", "factorizable", "matrix_spectrum", "obstacles", "plan", "profile", "progress",
    "read_json", "resolve", "run_example", "spectra", "stable_rank", "svd", "totals", "track", "write_text",
]  # fmt: skip
